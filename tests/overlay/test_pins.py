import pytest

from overlay.pins import Pins


def test_the_real_pins_name_every_upstream_once():
    pins = Pins.read()
    names = {upstream.name for upstream in pins.upstreams}
    assert {"verl", "vllm", "vllm-ascend", "megatron-lm", "mindspeed", "mindspeed-llm", "torch"} <= names
    assert pins.rooms() == [
        "verl_patches",
        "vllm_patches",
        "vllm_ascend_patches",
        "megatron_patches",
        "mindspeed_patches",
    ]
    assert pins.of_module("megatron.core.parallel_state").release == "0.8.0"
    assert pins.of_module("vllm_ascend.ops").name == "vllm-ascend" and pins.of_module("vllmx") is None
    assert (
        pins.of_module("verl").commit.startswith("54c9b736")
        and "release verl 0.4.0" in pins.of_module("verl").supported()
    )
    assert "verl_patches" in pins.patched_packages() and "torch" not in pins.patched_packages()


def test_an_unknown_key_or_a_missing_package_list_is_an_error(tmp_path):
    file = tmp_path / "pins.toml"
    file.write_text('[acme]\npackages = ["acme"]\ncluster = { tag = "v1" }\n')
    with pytest.raises(TypeError, match="tag"):
        Pins.read(file)
    file.write_text("[acme]\n")
    with pytest.raises(KeyError, match="packages"):
        Pins.read(file)
