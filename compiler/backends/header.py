"""Who wrote an artefact: the lines that stand at the head of files which are not JSON."""

from __future__ import annotations

import json
import re

from parcompile.plan import Plan


def header(plan: Plan, about: str, *, comment: str = "#") -> list[str]:
    """Comment lines with the plan's identity.

    The name is written as a JSON string: quotes and control characters of it are escaped, so it cannot end the comment.
    """
    name = json.dumps(plan.spec.name, ensure_ascii=True)
    lines = [
        about,
        f"plan {name}, {plan.world_size} ranks",
        f"parcompile {plan.compiler_version}, spec {plan.spec_hash}",
    ]
    return [f"{comment} {line}" for line in lines]


def slug(name: str, *, limit: int = 50) -> str:
    """The name as a DNS label: lower-case letters, digits and single hyphens, as Kubernetes and Slurm take them."""
    text = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:limit].rstrip("-")
    return text or "unnamed"
