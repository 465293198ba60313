"""What a schema finds wrong in a document, said so that a person can mend it.

`validation` runs a schema; `alternatives` and the modules behind it turn what jsonschema says into diagnostics: the
deepest useful error, the branch that was meant, the key or value that was nearly written.
"""

from .validation import (
    BASE,
    NoDefaultError,
    UnknownSchemaError,
    Validation,
    default,
    example,
    load,
    names,
    registry,
    text,
    type_of,
    validate,
)
