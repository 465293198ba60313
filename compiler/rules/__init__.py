"""The semantic rules: what a layout must satisfy. One small function per rule, registered with its page."""

from .registry import DEFAULT_TARGETS, TARGETS, Finding, Rule, all_rules, check, rule

__all__ = ["DEFAULT_TARGETS", "TARGETS", "Finding", "Rule", "all_rules", "check", "rule"]
