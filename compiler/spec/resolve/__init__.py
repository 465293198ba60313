"""Decides every value of a spec, lazily, and remembers where each comes from.

Rules read a `Resolution`. A value that is wrong, or that depends on one that is, raises `Unavailable` when it is read,
and the rule that asked stays quiet: each mistake is reported once, where it is. When no rule complains,
`Resolution.spec()` is complete.
"""

from parcompile.spec import Spec

from .reader import Unavailable
from .training import ContextValues

# The whole spec, decided.


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
            offload_optimizer=self.offload_of("optimizer"),
            offload_param=self.offload_of("param"),
            deepspeed=dict(self.get("deepspeed")),
            provenance=dict(sorted(self.provenance.items())),
            megatron=dict(self.get("backends", "megatron")) if self.given("backends", "megatron") else {},
        )
