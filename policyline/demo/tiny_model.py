"""Makes a tiny base model with a tokenizer, and PEFT adapters for it; run as a child process.

    python -m policyline.demo.tiny_model base DIR [--head-scale 8]
    python -m policyline.demo.tiny_model adapters BASE OUT N

The one module of the command that imports torch: it takes seconds and 500 MB. Nothing is
downloaded. The model is a random Qwen2 in bfloat16 with heads of 64, the smallest that vLLM's CPU
attention takes.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.utils.logging import disable_progress_bar

_CHATML = """{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + \
message.content + '<|im_end|>' + '\\n' }}{%- endfor %}{%- if add_generation_prompt %}\
{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def write_base(directory: Path, *, seed: int = 0, head_scale: float = 1.0) -> None:
    """Write a Qwen2 of two layers with random weights, and its tokenizer, into `directory`.

    Args:
        directory: is made.
        seed: of the weights.
        head_scale: of the output layer. With 1 all tokens stay nearly equally likely, whatever is
            learnt; with 8 a reward rises within some dozen steps.
    """
    tokenizer = _train_tokenizer()
    tokenizer.save_pretrained(directory)
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(head_scale)
    model.to(torch.bfloat16).save_pretrained(directory)


def _train_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of 512 tokens on sums, with the special tokens of Qwen."""
    corpus = [f"What is {a} plus {b}? The answer is {a + b}." for a in range(60) for b in range(60)]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(corpus, trainer)
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, **special)
    tokenizer.chat_template = _chat_template()
    return tokenizer


def _chat_template() -> str:
    """Return the template that TRL's trainers know for Qwen2.5; without TRL a plain ChatML."""
    try:
        from trl.chat_template_utils import qwen2_5_chat_template  # noqa: PLC0415 - TRL is optional
    except ImportError:
        return _CHATML
    return str(qwen2_5_chat_template)


def write_adapters(base: Path, out: Path, count: int) -> list[Path]:
    """Write `count` clearly different rank-1 adapters into `out/adapter-1`, `out/adapter-2`, ..."""
    config = LoraConfig(r=1, lora_alpha=2, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16), config)
    directories = []
    for number in range(1, count + 1):
        torch.manual_seed(number)
        for name, tensor in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(tensor, std=0.3)
        directories.append(out / f"adapter-{number}")
        model.save_pretrained(directories[-1])
    return directories


def main(argv: Sequence[str] | None = None) -> int:
    """Run one of the two commands."""
    parser = argparse.ArgumentParser(prog="python -m policyline.demo.tiny_model")
    commands = parser.add_subparsers(dest="command", required=True)
    base = commands.add_parser("base", help="a tiny Qwen2 and its tokenizer")
    base.add_argument("directory", type=Path)
    base.add_argument("--head-scale", type=float, default=1.0)
    adapters = commands.add_parser("adapters", help="rank-1 PEFT adapters for it")
    adapters.add_argument("base", type=Path)
    adapters.add_argument("out", type=Path)
    adapters.add_argument("count", type=int)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    disable_progress_bar()
    if arguments.command == "base":
        write_base(arguments.directory, head_scale=arguments.head_scale)
    else:
        write_adapters(arguments.base, arguments.out, arguments.count)
    return 0


if __name__ == "__main__":
    sys.exit(main())
