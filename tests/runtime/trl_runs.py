"""Scripts of trl, drawn at random: in one process as they are, and by a plan with a line more.

SFT (padded, packed, flattened; completions alone, or chats; dft; label smoothing), DPO, KTO, with and without LoRA,
over tp, cp, ep, dp, the ways of context parallelism, ZeRO stages and recomputation, on 2 to 4 ranks.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from closeness import Margin, margins, nudge
from families import tiny_config
from ranks import run_ranks
from training_runs import dp_of, initial_model, make_plan, trainer_arguments, whole_parameters, whole_weights

from parcompile.plan import Plan

LENGTH, WORDS = 16, 61
CHATS = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}3 {% generation %}{{ message['content'] }} 2 "
    "{% endgeneration %}{% else %}4 {{ message['content'] }} {% endif %}{% endfor %}"
)


class Run(NamedTuple):
    """A script and its layout."""

    kind: str
    """The trainer's name without `Trainer`."""
    family: str
    world: int
    parallelism: dict[str, Any]
    training: dict[str, Any]
    given: dict[str, Any]
    """Arguments of the script."""
    zero: int = 1
    lora: bool = False
    data: str = "text"
    """The form of an SFT sample: text, completion or chat."""
    rows: int = 8

    @property
    def text(self) -> str:
        """As a row of a table says it."""
        axes = {"dp": dp_of(self.world, self.parallelism), **self.parallelism}
        sizes = " ".join(f"{one}{axes[one]}" for one in ("tp", "cp", "ep", "dp") if axes.get(one, 1) > 1)
        said = [self.kind + " LoRA" * self.lora, self.family, sizes]
        said += [f"{name} {axes[name]}" for name in ("sequence_parallel", "cp_implementation") if name in axes]
        said += [f"{self.rows} rows"] + [f"ZeRO {self.zero}"] * (self.zero != 1) + [self.data] * (self.kind == "SFT")
        said += [f"{name} {value}" for name, value in {**self.training, **self.given}.items() if name in _SAID]
        return ", ".join(one.replace(" True", "") for one in said)

    def plan(self) -> Plan:
        """The compiled plan."""
        model = {**tiny_config(self.family), **({"num_labels": 1} if self.kind == "Reward" else {})}
        training = {"sequence_length": LENGTH, "optimizer": _OPTIMIZER, **self.training}
        if self.given.get("packing") or self.given.get("padding_free"):  # one row of all samples
            training["sequence_length"] *= self.training["micro_batch_size"]
        extra = {"zero": {"stage": self.zero}}
        return make_plan(
            self.world, self.parallelism, model=model, whole_model=True, training=training, extra=extra
        )  # fmt: skip


_OPTIMIZER = {"lr": 1e-3, "eps": 1e-3, "weight_decay": 0.1}
"""Adam turns a gradient that is rounding noise into a full step: a large epsilon does not."""
_SAID = (
    *("packing", "packing_strategy", "padding_free", "loss_type", "label_smoothing_factor", "activation_checkpointing"),
    *("micro_batch_size", "global_batch_size", "gradient_clipping", "precompute_ref_log_probs", "use_weighting"),
    *("assistant_only_loss", "lr_scheduler_type", "eval_strategy", "f_divergence_type"),
    "center_rewards_coefficient",
)

LAYOUTS: tuple[tuple[int, dict[str, Any]], ...] = (
    *((2, one) for one in ({}, {"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"cp": 2})),
    *((4, one) for one in ({"tp": 2}, {"cp": 2}, {"tp": 2, "cp": 2}, {"tp": 2, "cp": 2, "sequence_parallel": True})),
    (4, {"tp": 4}),
    *((4, {"cp": 4, "cp_implementation": one}) for one in ("ring", "all_gather", "ulysses")),
)
OF_EXPERTS: tuple[tuple[int, dict[str, Any]], ...] = (
    *((2, one) for one in ({"ep": 2}, {"ep": 2, "cp": 2})),
    *((4, one) for one in ({"ep": 2}, {"ep": 4}, {"tp": 2, "ep": 2}, {"ep": 2, "cp": 2})),
)
LOSSES = {
    "DPO": (["sigmoid"], ["hinge"], ["ipo"], ["robust"], ["apo_zero"], ["sppo_hard"], ["sigmoid_norm"], ["bco_pair"]),
    "KTO": ("kto", "apo_zero_unpaired"),
}
REWARDS = 1000
"""From this number on scripts of RewardTrainer are drawn."""


def draw(number: int) -> Run:
    """The same for the same number; kinds take turns."""
    choose = random.Random(number)
    kind = "Reward" if number >= REWARDS else ("SFT", "DPO", "SFT", "KTO")[number % 4]
    family = choose.choice(("llama", "qwen3", "gemma2", "mixtral", "qwen3_moe"))
    while True:
        dealt = family[0] == "m" or family.endswith("moe")
        world, parallelism = choose.choice(OF_EXPERTS if dealt else LAYOUTS)
        dp = dp_of(world, parallelism)
        micro = choose.choice([size for size in (1, 2, 4) if dp * size <= 4])
        if kind == "KTO" and micro == 1:  # trl refuses it
            continue
        training = {
            "micro_batch_size": micro,
            "global_batch_size": choose.choice([size for size in (4, 8) if size >= dp * micro]),
            "activation_checkpointing": choose.choice(("none", "full")),
            "gradient_clipping": choose.choice((0.05, 100.0)),
        }
        given: dict[str, Any] = {"lr_scheduler_type": choose.choice(("linear", "cosine"))}
        if choose.random() < 0.4:
            given |= {"eval_strategy": "epoch", "per_device_eval_batch_size": 2}
        data = "text"
        if kind == "SFT":
            data = choose.choice(("text", "completion", "chat"))
            given |= choose.choice(_OF_SFT)
            if data == "chat":
                given["assistant_only_loss"] = True
            if "eval_strategy" in given and (given.get("packing") or given.get("padding_free")):
                given["per_device_eval_batch_size"] = micro  # its rows are one sequence
        elif kind == "DPO":
            given["loss_type"] = choose.choice(LOSSES["DPO"])
            given |= choose.choice(({}, {}, {"precompute_ref_log_probs": True}, {"use_weighting": True}))
        elif kind == "KTO":
            given["loss_type"] = choose.choice(LOSSES["KTO"])
        else:
            given |= choose.choice(({}, {"center_rewards_coefficient": 0.1}))
        if dealt and kind != "Reward":
            given["router_aux_loss_coef"] = 0.0
        run = Run(
            kind, family, world, parallelism, training, given, choose.choice((0, 1, 1, 2, 3)),
            lora=choose.random() < 0.35, data=data,
            rows=choose.randint(22, 26) if given.get("packing") else choose.choice((8, 9, 10, 11)),
        )  # fmt: skip
        try:
            run.plan()
        except AssertionError:  # a rule refuses it
            continue
        return run


_OF_SFT: tuple[dict[str, Any], ...] = (
    {},
    {"loss_type": "dft"},
    {"label_smoothing_factor": 0.1},
    {"packing": True},
    {"packing": True},
    {"packing": True, "packing_strategy": "wrapped"},
    {"padding_free": True, "max_length": None},
)


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({str(number): number for number in range(WORDS)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="2", pad_token="0", chat_template=CHATS)


def write_data(run: Run, folder: str, count: int, seed: int = 3) -> None:
    """Writes rows to a folder."""
    from datasets import Dataset

    generator = torch.Generator().manual_seed(seed)

    def text(words: int) -> str:
        return " ".join(map(str, torch.randint(5, 60, (words,), generator=generator).tolist()))

    if run.kind == "SFT" and run.data == "text":
        rows: list[dict[str, Any]] = [{"text": text(6 + 5 * n % 7)} for n in range(count)]
    elif run.kind == "SFT" and run.data == "chat":
        rows = [
            {"messages": [{"role": role, "content": text(2 + n % 3)} for role in ("user", "assistant") * (1 + n % 2)]}
            for n in range(count)
        ]
    elif run.kind == "SFT":
        rows = [{"prompt": text(3 + n % 3) + " ", "completion": text(4 + n % 4)} for n in range(count)]
    elif run.kind == "GRPO":
        rows = [{"prompt": text(3 + n % 4)} for n in range(count)]
    elif run.kind == "KTO":
        rows = [
            {"prompt": text(3) + " ", "completion": text(4 + n % 4), "label": bool((n // 2 + n) % 2)}
            for n in range(count)
        ]
    else:
        rows = [{"prompt": text(3) + " ", "chosen": text(4 + n % 4), "rejected": text(5)} for n in range(count)]
    # Of rows in memory trl looks for precomputed values in a folder of its process, where other ranks have none.
    Dataset.from_list(rows).save_to_disk(folder)


def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Completions of GRPO that follow from prompt, place in its group and step, whatever the layout."""
    ids = [trainer.processing_class(one)["input_ids"] for one in prompts]
    found, seen = [], dict[str, int]()
    for one in prompts:
        seen[one] = seen.get(one, 0) + 1
        choose = random.Random(f"{one} {seen[one]} {trainer.state.global_step}")
        found.append([choose.randint(5, 59) for _ in range(choose.randint(2, 6))] + [2] * choose.randint(0, 1))
    return {"prompt_ids": ids, "completion_ids": found, "logprobs": None}


def by_words(completions: list[str], **_: Any) -> list[float]:
    """Rewards of completions."""
    return [float(sum(map(int, one.split())) % 13) for one in completions]


def drawing_as_ranks(trainer: Any) -> Any:
    """A class of trl whose completions in one process are drawn as those of a plan without dp."""

    class Drawing(trainer):  # type: ignore[misc]
        def _prepare_inputs(self, batch: Any) -> Any:
            with torch.random.fork_rng():
                torch.manual_seed(self.args.seed * 1_000_003 + self._step)
                return super()._prepare_inputs(batch)

        def _generate_single_turn(self, *given: Any, **named: Any) -> Any:
            seed = int(torch.randint(2**62, (1,)))
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                return super()._generate_single_turn(*given, **named)

    return Drawing


def script(
    run: Run, plan: Plan, folder: str, changed: Callable[[Any], Any], nudged: int | None = None, **given: Any
) -> Any:
    """What somebody has written for trl; `changed` is what the line more does."""
    import trl
    from datasets import load_from_disk
    from transformers import EarlyStoppingCallback, PrinterCallback

    trainer, arguments = getattr(trl, f"{run.kind}Trainer"), getattr(trl, f"{run.kind}Config")
    limit = {"max_completion_length": 6} if run.kind == "GRPO" else {"max_length": LENGTH}
    options = {**limit, "save_strategy": "no", **run.given, **given}
    resume = options.pop("resume", None)
    args = arguments(
        folder, num_train_epochs=2, logging_steps=1, report_to=[], disable_tqdm=True, use_cpu=True, bf16=False,
        log_level="error", **options,
    )  # fmt: skip
    model, further = initial_model(plan), {}
    nudge(model, nudged)
    if run.lora:
        from peft import LoraConfig

        target = ["q_proj", "v_proj", "o_proj"]
        task = None if run.kind == "Reward" else "CAUSAL_LM"
        further["peft_config"] = LoraConfig(r=4, target_modules=target, init_lora_weights=False, task_type=task)
    elif run.kind in ("DPO", "KTO"):
        further["ref_model"] = initial_model(plan)
        for parameter in further["ref_model"].parameters():
            parameter.data *= 1.1 if run.kind == "KTO" else 0.9  # the divergence of KTO is above 0
    if run.kind == "GRPO":
        further |= {"reward_funcs": by_words, **({} if run.data == "generated" else {"rollout_func": rollout})}
    if "eval_strategy" in run.given:
        further["eval_dataset"] = load_from_disk(f"{folder}/eval")
    rows = load_from_disk(f"{folder}/rows")
    made = changed(trainer)(model=model, args=args, train_dataset=rows, processing_class=tokenizer(), **further)
    made.remove_callback(PrinterCallback)
    if options.get("load_best_model_at_end"):
        made.add_callback(EarlyStoppingCallback(1))
    made.train(resume_from_checkpoint=resume and f"{folder}/{resume}")
    return made


def logged(trainer: Any) -> list[dict[str, float]]:
    clocks = ("runtime", "per_second", "step_time")
    lines = trainer.state.log_history
    return [{name: value for name, value in one.items() if not name.endswith(clocks)} for one in lines]


def on_ranks(rank: int, run: Run, plan: Plan, folder: str) -> dict[str, Any]:
    from parcompile.runtime import adapter_state
    from parcompile.runtime.trainer import parallelise

    trainer = script(run, plan, folder, lambda trainer: parallelise(trainer, plan))
    found = {"rank": rank, "log": logged(trainer)}
    if run.lora:
        return {**found, "parameters": adapter_state(trainer.model, trainer.mesh)}
    return {**found, "parameters": whole_weights(trainer.model)}


def in_one_process(run: Run, plan: Plan, folder: str, seed: int | None = None) -> dict[str, Any]:
    given = {**trainer_arguments(plan), "gradient_checkpointing": False}
    generated = run.data == "generated"
    trainer = script(run, plan, folder, drawing_as_ranks if generated else lambda one: one, seed, **given)
    if run.lora:
        from peft import get_peft_model_state_dict

        parameters = get_peft_model_state_dict(trainer.model)
    else:
        parameters = dict(trainer.model.named_parameters())
    return {"log": logged(trainer), "parameters": {name: one.detach() for name, one in parameters.items()}}


def compare(run: Run, folder: str) -> list[Margin]:
    """How far live ranks are from one process: every number of the log, and all weights that are trained."""
    plan, places = run.plan(), [f"{folder}/ranks", f"{folder}/plain"]
    for place in places:
        write_data(run, f"{place}/rows", run.rows)
        write_data(run, f"{place}/eval", 5, seed=5)
    ranks = run_ranks(run.world, on_ranks, run, plan, places[0])
    for rank in ranks[1:]:
        assert rank["log"] == ranks[0]["log"], "the ranks differ in their logs"
    parameters = ranks[0]["parameters"] if run.lora else whole_parameters(plan, ranks)
    found, expected = {"log": ranks[0]["log"], "parameters": parameters}, in_one_process(run, plan, places[1])
    if plan.spec.parallelism.dp > 1:  # each rank pads to the longest of its own batch
        for one in (found, expected):
            one["log"][-1].pop("total_flos")
    return margins(found, expected, rerun=lambda seed: in_one_process(run, plan, places[1], seed))
