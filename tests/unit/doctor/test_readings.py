"""How a server's answers are read."""

from __future__ import annotations

from policyline.doctor.engine_facts import read_config, read_metrics

METRICS = """
process_start_time_seconds 1.79596071005e+09
vllm:num_requests_running{engine="0",model_name="tiny"} 0.0
vllm:num_requests_running{engine="1",model_name="tiny"} 0.0
vllm:lora_requests_info{max_lora="6",running_lora_adapters="",waiting_lora_adapters=""} 1.0
"""


def test_metrics_tell_lives_engines_and_slots() -> None:
    found = read_metrics([METRICS.replace("1.79", "1.78"), METRICS])

    assert found.incarnations == ("1.78596071005e+09", "1.79596071005e+09")
    assert (found.engines, found.max_loras) == (2, 6)


def test_metrics_may_tell_nothing() -> None:
    found = read_metrics(["# nothing\n"])

    assert (found.incarnations, found.engines, found.max_loras) == ((), 0, None)


def test_the_configuration_as_vllm_tells_it() -> None:
    info = {
        "vllm_config": {
            "lora_config": {"max_loras": 4, "max_cpu_loras": 8, "max_lora_rank": 16},
            "parallel_config": {"data_parallel_size": 2, "_api_process_count": 3},
        },
        "vllm_env": {"VLLM_PLUGINS": ["x"]},
    }

    config = read_config(info)

    assert (config.max_loras, config.max_cpu_loras, config.max_lora_rank) == (4, 8, 16)
    assert (config.has_lora, config.data_parallel, config.api_servers) == (True, 2, 3)
    assert config.environment == {"VLLM_PLUGINS": ["x"]}


def test_a_configuration_without_lora_or_of_another_shape() -> None:
    config = read_config({"vllm_config": {"lora_config": None, "parallel_config": []}})

    assert (config.has_lora, config.max_loras) == (False, None)
    assert (config.data_parallel, config.api_servers, config.environment) == (1, None, {})
