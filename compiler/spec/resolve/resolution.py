"""The whole spec, decided."""

from __future__ import annotations

from parcompile.spec import Spec

from .cp_implementation import ContextValues


class Resolution(ContextValues):
    """The values of a spec. The arguments are those of `SpecReader`."""

    def spec(self) -> Spec:
        """The resolved spec.

        Raises:
            Unavailable: an error was reported that leaves a value undecided.
        """
        return Spec(
            name=self.get("name"),
            model=self.model(),
            cluster=self.cluster,
            parallelism=self.parallelism(self.context_parallel),
            training=self.training(),
            zero_stage=self.zero_stage,
            deepspeed=dict(self.get("deepspeed")),
            provenance=dict(sorted(self.provenance.items())),
            megatron=dict(self.get("backends", "megatron")) if self.given("backends", "megatron") else {},
        )
