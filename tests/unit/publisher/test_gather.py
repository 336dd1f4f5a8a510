"""A PEFT model's LoRA as it is gathered and saved; configurations that are refused at once."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from policyline.ledger.probe import PROBE_TOKENS
from policyline.publisher.check.adapter_config import CONFIG_NAME
from policyline.publisher.check.source import WEIGHTS_NAME
from policyline.publisher.errors import CheckFailed, NotSupported

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def model(tiny_base: Path) -> Any:
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415 - comes with the engine
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - as above

    config = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "down_proj"])
    return get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_base), config)


def test_what_is_saved_is_what_peft_would_save(model: Any, tmp_path: Path) -> None:
    from policyline.publisher.training.gather import gather, peft_model_of  # noqa: PLC0415 - as above

    whole = gather(peft_model_of(model), "default")
    whole.save(tmp_path)
    model.save_pretrained(tmp_path / "peft")
    ours = load_file(tmp_path / WEIGHTS_NAME)
    theirs = load_file(tmp_path / "peft" / WEIGHTS_NAME)
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    configs = [
        json.loads((directory / CONFIG_NAME).read_text())
        for directory in (tmp_path, tmp_path / "peft")
    ]
    for config in configs:
        del config["auto_mapping"]  # for loading without a task type, which vLLM does not
    assert configs[0] == configs[1]


def test_gathering_copies_so_that_training_can_go_on(model: Any) -> None:
    import torch  # noqa: PLC0415 - as above

    from policyline.publisher.training.gather import gather  # noqa: PLC0415 - as above

    whole = gather(model, "default")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(1.0)
    assert not any(t.any() for name, t in whole.tensors.items() if "lora_B" in name)


def test_a_configuration_is_refused_with_every_reason() -> None:
    from peft import LoraConfig  # noqa: PLC0415 - as above

    from policyline.publisher.training.gather import check_config  # noqa: PLC0415 - as above

    config = LoraConfig(
        r=2, target_modules=["q_proj", "lm_head"], use_dora=True, modules_to_save=["score"]
    )
    config.bias = "all"
    with pytest.raises(CheckFailed) as refused:
        check_config(config)
    for reason in ("DoRA", "full copies of modules", "trained bias", "LoRA on head"):
        assert reason in str(refused.value)


def test_a_shard_is_refused(model: Any, tiny_base: Path) -> None:
    from policyline.publisher.training.gather import Gathered, check_adapter, gather  # noqa: PLC0415 - as above

    whole = gather(model, "default")
    half = {n: t for n, t in whole.tensors.items() if "layers.0." in n}
    with pytest.raises(CheckFailed, match="saved on one rank of a sharded model"):
        check_adapter(Gathered(half, whole.config), str(tiny_base), None)
    flat = {n: t.flatten() for n, t in whole.tensors.items()}
    with pytest.raises(CheckFailed, match="expected two dimensions: was it saved on one rank"):
        check_adapter(Gathered(flat, whole.config), str(tiny_base), None)
    check_adapter(whole, str(tiny_base), 2)
    with pytest.raises(CheckFailed, match="rank 2 is above the servers' limit 1"):
        check_adapter(whole, str(tiny_base), 1)


def test_a_model_without_lora_is_refused(model: Any) -> None:
    from policyline.publisher.training.gather import peft_model_of  # noqa: PLC0415 - as above

    with pytest.raises(NotSupported, match="Qwen2ForCausalLM has no LoRA to publish"):
        peft_model_of(model.unload())


def test_the_trainers_own_probe(model: Any) -> None:
    from policyline.publisher.training.trl_private import score  # noqa: PLC0415 - as above

    model.train()
    values = score(model, nullcontext())
    assert len(values) == len(PROBE_TOKENS) - 1
    assert all(-20 < v < 0 for v in values)
    assert model.training
