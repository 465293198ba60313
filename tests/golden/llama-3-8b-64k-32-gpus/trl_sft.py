# Written for trl 1.16.0
# plan "llama-3-8b-64k", 32 ranks
# parcompile 0.1.0, spec sha256:b49a32f704fdb309f069d0228c98fdf06b4330f720a2fb17689e2db48c76052b
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
    args=SFTConfig(given.output, max_length=65536, logging_steps=1, lr_scheduler_type='constant', bf16=True, report_to=[]),
    train_dataset=load_dataset("json", data_files=given.data, split="train"),
    processing_class=AutoTokenizer.from_pretrained(given.model),
)
trainer.train()
trainer.save_model(given.output)
