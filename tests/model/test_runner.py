"""`ModelRunner`: what it reports, how it sizes its pool, and what it says when things do not fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

from engine_core import EngineConfig, EngineCore, EngineRequest, InvalidConfigError, SamplingParams
from engine_core.model import memory
from engine_core.model.fingerprint import cache_namespace, model_fingerprint
from engine_core.model.loader import choose_device, choose_dtype
from engine_core.model.runner import ModelRunner
from tests.tiny_models import make_tiny_chat_model, make_tiny_model

# 4 layers × 2 KV heads × (16 + 16) values × 4 bytes × 16 tokens
TINY_BLOCK_BYTES = 4 * 2 * 32 * 4 * 16


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_chat_model(tmp_path_factory.mktemp("models") / "tiny")


def make_config(directory: Path, **settings: object) -> EngineConfig:
    return EngineConfig(**({"model": str(directory), "dtype": "float32", "device": "cpu"} | settings))


def test_it_reports_what_the_engine_must_know(tiny: Path) -> None:
    info = ModelRunner(make_config(tiny, num_blocks=8)).info
    assert (info.name, info.vocab_size, info.max_model_len, info.num_blocks) == ("tiny", 512, 4096, 8)
    assert info.eos_token_ids == {2}
    bytes.fromhex(info.cache_namespace)


def test_every_end_of_sequence_id_counts(tmp_path: Path) -> None:
    directory = make_tiny_model("llama", tmp_path, eos_token_id=[5, 6])
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [6, 7]}))
    assert ModelRunner(make_config(directory, num_blocks=1)).info.eos_token_ids == {5, 6, 7}


def test_num_blocks_comes_before_bytes(tiny: Path) -> None:
    assert ModelRunner(make_config(tiny, num_blocks=3, kv_cache_memory_bytes=1 << 30)).info.num_blocks == 3


def test_bytes_are_rounded_down_to_blocks(tiny: Path) -> None:
    runner = ModelRunner(make_config(tiny, kv_cache_memory_bytes=10 * TINY_BLOCK_BYTES + 1))
    assert runner.info.num_blocks == 10
    caches = runner.pool.tensors
    assert sum(cache.nbytes for cache in caches) == 10 * TINY_BLOCK_BYTES
    assert {tuple(cache.shape) for cache in caches} == {(10, 16, 2, 16)}


def test_a_pool_without_room_for_one_block_is_refused_with_the_numbers(tiny: Path) -> None:
    with pytest.raises(InvalidConfigError, match=rf"kv_cache_memory_bytes leaves 100 .* {TINY_BLOCK_BYTES} bytes"):
        ModelRunner(make_config(tiny, kv_cache_memory_bytes=100))


def test_by_default_most_of_the_memory_stays_free(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 400 * TINY_BLOCK_BYTES)
    assert ModelRunner(make_config(tiny)).info.num_blocks == 100
    monkeypatch.undo()
    # A pool holds more than its running requests: what finished ones leave is what later ones find.
    assert ModelRunner(make_config(tiny, max_num_seqs=1, max_model_len=33)).info.num_blocks > 1000


@pytest.mark.parametrize(
    "setting", [{"num_blocks": 10**9}, {"kv_cache_memory_bytes": 10**9 * TINY_BLOCK_BYTES}], ids=str
)
def test_more_than_the_machine_has_is_refused_with_the_numbers(tiny: Path, setting: dict) -> None:
    with pytest.raises(InvalidConfigError, match=rf"{next(iter(setting))}.* {10**9 * TINY_BLOCK_BYTES} bytes, \d+"):
        ModelRunner(make_config(tiny, **setting))


def test_sharing_of_blocks_needs_the_same_weights_dtype_and_layout(tiny: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny, tmp_path / "copy"))
    other = make_tiny_chat_model(tmp_path / "other", seed=1)
    fingerprint = model_fingerprint(tiny)
    assert model_fingerprint(copy) == fingerprint != model_fingerprint(other)

    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    assert model_fingerprint(copy) != fingerprint

    namespaces = {
        cache_namespace(fingerprint, "float32", "float32", 16),
        cache_namespace(fingerprint, "bfloat16", "bfloat16", 16),
        cache_namespace(fingerprint, "float32", "int8", 16),
        cache_namespace(fingerprint, "bfloat16", "int8", 16),
        cache_namespace(fingerprint, "float32", "float32", 32),
        cache_namespace(model_fingerprint(other), "float32", "float32", 16),
        cache_namespace(fingerprint, "float32", "float32", 16, None, [(0, 2), (1, 3)]),
        cache_namespace(fingerprint, "float32", "float32", 16, None, [(0, 1), (2, 3)]),
    }
    assert len(namespaces) == 8
    assert cache_namespace(fingerprint, "float32", "float32", 16, None, [(0, 1, 2, 3)]) in namespaces


def test_a_directory_without_usable_weights_is_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match=r"has no config\.json"):
        ModelRunner(make_config(tmp_path))
    shutil.copy(tiny / "config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(InvalidConfigError, match=r"has no \*\.safetensors"):
        ModelRunner(make_config(tmp_path))


def test_weights_that_lack_a_tensor_are_refused(tiny: Path, tmp_path: Path) -> None:
    """transformers would fill it with noise and go on."""
    broken = Path(shutil.copytree(tiny, tmp_path / "broken"))
    tensors = safetensors.torch.load_file(broken / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    safetensors.torch.save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(InvalidConfigError, match=r"lack model\.layers\.1\.mlp\.up_proj\.weight"):
        ModelRunner(make_config(broken))


def test_a_configuration_transformers_does_not_know_is_refused(tiny: Path, tmp_path: Path) -> None:
    unknown = Path(shutil.copytree(tiny, tmp_path / "unknown"))
    (unknown / "config.json").write_text(json.dumps({"model_type": "from-the-future"}))
    with pytest.raises(InvalidConfigError, match=r"transformers cannot read .*config\.json: .*from-the-future"):
        ModelRunner(make_config(unknown))


def test_a_longer_context_than_the_models_is_refused(tiny: Path) -> None:
    with pytest.raises(InvalidConfigError, match=r"max_model_len: 4097 exceeds the model's 4096"):
        ModelRunner(make_config(tiny, max_model_len=4097))
    assert ModelRunner(make_config(tiny, max_model_len=100, num_blocks=1)).info.max_model_len == 100


def test_devices_that_are_not_there_are_refused() -> None:
    with pytest.raises(InvalidConfigError, match="device: 'abacus' is not a device"):
        choose_device("abacus")
    if not torch.cuda.is_available():
        with pytest.raises(InvalidConfigError, match="torch sees no CUDA device"):
            choose_device("cuda")


def test_auto_is_bfloat16_only_where_it_is_computed_in(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    for has_it, expected in [(True, torch.bfloat16), (False, torch.float32)]:
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda has_it=has_it: has_it)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        assert choose_dtype("auto", cpu) == expected
    assert choose_dtype("float16", cpu) == torch.float16


def test_bfloat16_stays_close_to_float32(tiny: Path) -> None:
    """Compared by the first token of many prompts: rounding may turn some, not most."""
    first_tokens = []
    for dtype in ("float32", "bfloat16"):
        engine = EngineCore(make_config(tiny, dtype=dtype, num_blocks=512))
        for i in range(40):
            prompt = [(i * 31 + j * 17) % 509 + 3 for j in range(20)]
            engine.add_request(EngineRequest(str(i), prompt, SamplingParams(temperature=0.0, max_tokens=1)))
        tokens = {}
        while engine.has_unfinished_requests():
            tokens |= {output.request_id: output.new_token_ids for output in engine.step().outputs}
        first_tokens.append(tokens)
    same = sum(first_tokens[0][key] == first_tokens[1][key] for key in first_tokens[0])
    assert len(first_tokens[0]) == 40
    assert same >= 30


def test_seeded_sampling_survives_preemption_and_company(tiny: Path) -> None:
    """The same seed gives the same tokens alone in a large pool and preempted among others in a small one."""
    prompts = [[(i * 13 + j * 7) % 509 + 3 for j in range(10 + i)] for i in range(6)]

    def outputs(engine: EngineCore, chosen: list[int]) -> list[list[int]]:
        tokens: dict[str, list[int]] = {str(i): [] for i in chosen}
        for i in chosen:
            params = SamplingParams(temperature=0.9, top_p=0.95, top_k=200, seed=i, max_tokens=40, ignore_eos=True)
            engine.add_request(EngineRequest(str(i), prompts[i], params))
        while engine.has_unfinished_requests():
            for output in engine.step().outputs:
                tokens[output.request_id].extend(output.new_token_ids)
        return list(tokens.values())

    roomy = EngineCore(make_config(tiny, num_blocks=100))
    alone = [outputs(roomy, [i])[0] for i in range(6)]
    cramped = EngineCore(make_config(tiny, num_blocks=9, reserve_full_sequence=False))
    assert outputs(cramped, list(range(6))) == alone
    assert cramped.stats().preemptions > 0
    assert len({tuple(tokens) for tokens in alone}) == 6
