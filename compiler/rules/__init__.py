"""The semantic rules: what a layout must satisfy. One small function per rule, registered with its page."""

from .registry import (
    CONCERNED,
    DEFAULT_TARGETS,
    ESTIMATE,
    EXPERTS_RULE,
    MEMORY_RULES,
    Finding,
    Rule,
    all_rules,
    check,
    rule,
    rule_targets,
)
