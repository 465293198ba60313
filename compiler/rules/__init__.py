"""The semantic rules: what a layout must satisfy. One small function per rule, registered with its page."""

from .registry import Finding, Rule, all_rules, check, rule

__all__ = ["Finding", "Rule", "all_rules", "check", "rule"]
