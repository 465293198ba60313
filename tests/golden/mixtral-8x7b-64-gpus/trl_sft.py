# Written for trl 1.16.0
# plan "mixtral-8x7b", 64 ranks
# parcompile 0.1.0, spec sha256:52888a869a4c0a19bcfda154c4186d7b8a0c8b6592201c311afb9e9c851697ea
"""Supervised fine-tuning by trl under the plan beside this file.

    bash launch/torchrun.sh trl_sft.py --model FOLDER --data FILE.jsonl

Each line of the file has a text, messages, or a prompt and its completion, as trl's SFTTrainer reads them. Batch,
precision, optimizer, clipping, seed and layout are the plan's. DPOTrainer and others take the same line.
"""

import argparse
from pathlib import Path

from datasets import load_dataset
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

from parcompile.runtime.trainer import parallelise

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--data", required=True)
parser.add_argument("--output", default="runs")
given = parser.parse_args()

SFTTrainer = parallelise(SFTTrainer, Path(__file__).resolve().parent)
trainer = SFTTrainer(
    model=given.model,
    args=SFTConfig(given.output, max_length=8192, logging_steps=1, lr_scheduler_type='constant', router_aux_loss_coef=0.0, bf16=True, report_to=[]),
    train_dataset=load_dataset("json", data_files=given.data, split="train"),
    processing_class=AutoTokenizer.from_pretrained(given.model),
)
trainer.train()
trainer.save_model(given.output)
