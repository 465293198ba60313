"""The gradient norm of a preference trainer of trl (DPO, CPO, ORPO, KTO, BCO) with four micro-batches, beside one."""

import sys
import tempfile
from typing import Any

import torch
import trl
from common import say
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback

kind = sys.argv[1]
words = ["[PAD]", "[END]", "a", "b", "c", "d", "e", "f"]
inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[PAD]"))
inner.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=inner, pad_token="[PAD]", eos_token="[END]", bos_token="[END]", unk_token="[PAD]"
)
answers = ["c d e", "d e f", "e f c", "f c d"] * 2
rows: list[dict[str, Any]]
if kind in ("KTO", "BCO"):
    rows = [{"prompt": "a b", "completion": one, "label": row % 2 == 0} for row, one in enumerate(answers)]
else:
    rows = [{"prompt": "a b", "chosen": one, "rejected": one[::-1]} for one in answers]


def norm(accumulation: int) -> float:
    """Of the first step on all rows."""
    norms = []

    class Log(TrainerCallback):  # type: ignore[misc]
        def on_log(self, *_: Any, logs: Any = None, **__: Any) -> None:
            if "grad_norm" in logs:
                norms.append(float(logs["grad_norm"]))

    def model() -> Any:
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        return LlamaForCausalLM(LlamaConfig(vocab_size=8, initializer_range=0.3, **sizes))

    with tempfile.TemporaryDirectory() as folder:
        arguments = getattr(trl, f"{kind}Config")(
            output_dir=folder, use_cpu=True, max_steps=1, logging_steps=1, report_to=[], save_strategy="no",
            per_device_train_batch_size=8 // accumulation, gradient_accumulation_steps=accumulation,
            max_grad_norm=1e9, max_length=16, max_prompt_length=8, remove_unused_columns=False, disable_tqdm=True,
        )  # fmt: skip
        arguments.disable_dropout = True
        reference = {} if kind in ("CPO", "ORPO") else {"ref_model": model()}
        getattr(trl, f"{kind}Trainer")(
            model=model(), args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
            callbacks=[Log()], **reference,
        ).train()  # fmt: skip
    return norms[0]


say("norm", norm(4), norm(1), 1e-2)
