"""The callback in a plain trainer of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from policyline.ledger import Ledger
from policyline.ledger.canonical import parse_object
from policyline.ledger.db.migrate import upgrade_url
from policyline.ledger.errors import StaleEpoch
from policyline.publisher import Publisher
from policyline.publisher.settings import PublishTo
from policyline.storage import open_storage

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def to(tmp_path: Path) -> PublishTo:
    (tmp_path / "storage").mkdir()
    upgrade_url(str(tmp_path / "run.db"))
    return PublishTo(ledger=str(tmp_path / "run.db"), storage=str(tmp_path / "storage"), run="sft")


def trainer(model: Path, output: Path, callback: Any, *more: Any, **settings: Any) -> Any:
    """Train a LoRA to say the same eight tokens."""
    from datasets import Dataset  # noqa: PLC0415 - comes with the engine
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415 - as above
    from transformers import (  # noqa: PLC0415 - as above
        AutoModelForCausalLM,
        Trainer,
        TrainingArguments,
    )

    config = LoraConfig(r=1, lora_alpha=2, target_modules="all-linear", task_type="CAUSAL_LM")
    row = list(range(5, 13))
    return Trainer(
        model=get_peft_model(AutoModelForCausalLM.from_pretrained(model), config),
        args=TrainingArguments(
            output_dir=str(output),
            max_steps=6,
            per_device_train_batch_size=2,
            logging_steps=1,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            **{"save_strategy": "no", **settings},
        ),
        train_dataset=Dataset.from_list([{"input_ids": row, "labels": row}] * 8),
        callbacks=[callback, *more],
    )


def metadata(to: PublishTo) -> list[dict[str, Any]]:
    """What was recorded with each version, by number."""
    with Ledger(to.ledger) as ledger:
        return [parse_object(v.manifest or "{}")["metadata"] for v in ledger.versions(run=to.run)]


def test_every_two_steps(to: PublishTo, tiny_base: Path, tmp_path: Path) -> None:
    from policyline.publisher.callback import PublishCallback  # noqa: PLC0415 - as above

    trainer(tiny_base, tmp_path / "out", PublishCallback(to, every_n_steps=2)).train()
    found = metadata(to)
    assert found[-1]["step"] == 6
    steps = [m["step"] for m in found]
    assert steps == sorted(set(steps) & {2, 4, 6})  # one that waited may have been replaced
    assert all(isinstance(m["loss"], float) and m["grad_norm"] > 0 for m in found)
    with Ledger(to.ledger) as ledger:
        assert ledger.run("sft").holder is None  # given back


def test_at_each_save(to: PublishTo, tiny_base: Path, tmp_path: Path) -> None:
    from policyline.publisher.callback import PublishCallback  # noqa: PLC0415 - as above

    saving = {"save_strategy": "steps", "save_steps": 3}
    trainer(tiny_base, tmp_path / "out", PublishCallback(to), **saving).train()
    assert metadata(to)[-1]["step"] == 6


def test_a_fenced_one_stops_training(to: PublishTo, tiny_base: Path, tmp_path: Path) -> None:
    from transformers import TrainerCallback  # noqa: PLC0415 - as above

    from policyline.publisher.callback import PublishCallback  # noqa: PLC0415 - as above

    ours = PublishCallback(to, every_n_steps=1)

    class Rival(TrainerCallback):  # type: ignore[misc]  # transformers is not typed here
        def on_step_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
            if state.global_step == 3:
                with Ledger(to.ledger) as ledger:
                    storage = open_storage(to.storage)
                    Publisher(ledger, storage, run=to.run, take_over=True).close()

    running = trainer(tiny_base, tmp_path / "out", ours, Rival())
    with pytest.raises(StaleEpoch):
        running.train()
    ours.close()


def test_an_adapter_that_nobody_can_serve_is_refused_before_the_first_step(
    to: PublishTo, tiny_base: Path, tmp_path: Path
) -> None:
    from policyline.publisher.callback import PublishCallback  # noqa: PLC0415 - as above
    from policyline.publisher.errors import CheckFailed  # noqa: PLC0415 - as above

    running = trainer(tiny_base, tmp_path / "out", PublishCallback(to, every_n_steps=1))
    running.model.peft_config["default"].use_dora = True
    with pytest.raises(CheckFailed, match="DoRA"):
        running.train()
    with Ledger(to.ledger) as ledger:
        assert ledger.runs() == []
