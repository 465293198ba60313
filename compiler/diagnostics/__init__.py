"""One mistake: what it is, where it stands, how it is mended, and how it is printed."""

from .diagnostic import (
    Diagnostic,
    Edit,
    Fix,
    Path,
    Position,
    Related,
    Replacement,
    Safety,
    Severity,
    format_path,
    has_errors,
    in_file_order,
)
