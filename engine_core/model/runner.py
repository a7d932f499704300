"""`ModelRunner`: a model, its KV pool and a sampler behind `engine_core.runner.Runner`."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine_core.config import EngineConfig
from engine_core.encoder_cache import encoder_cache_bytes
from engine_core.errors import AdapterError, InvalidConfigError
from engine_core.lora.adapter import Adapter
from engine_core.runner import LaunchedStep, ModelInfo, ScheduledRequest, SlotCopy, StepResult
from ipc.threads import model_threads
from ipc.vocabulary import MultimodalFeature
from kernels.copy_blocks import copy_slots
from kernels.dispatch import uses_triton

from .attention import PagedKV
from .decode_graphs import DecodeGraphs, capture_all, capture_sizes, is_plain_decode, measure_all
from .device_queue import CudaQueue, DeviceQueue
from .fingerprint import cache_namespace, model_fingerprint, tokenizer_digest
from .forward import step_logits
from .head_replay import decoding_once
from .host_memory import give_back_freed_memory
from .input_batch import InputBatch, Places, SampledTokens, StepLayout, build_input_batch, lay_out
from .kv_groups import described, group_layers, wasted_share
from .kv_pool import KVPool, PoolLayout, choose_kv_dtype
from .loader import choose_device, choose_dtype, end_of_sequence_ids, load_config, load_model, takes_pictures
from .logit_rules import LogitRules
from .logprobs import add_prompt_logprobs, add_sampled_logprobs
from .lora.adapter_rows import AdapterRows, LayerAdapters
from .lora.model_adapters import AdapterTargets, ModelAdapters, slots_of_requests
from .memory import choose_num_blocks
from .passes import PassError, apply_passes
from .passes.quantizing import check_quantization
from .picture_encoder import EncodedRows
from .picture_probe import check_pictures
from .pictures import Pictures
from .probe import probe_layers
from .rehearsal import SCRATCH_BLOCK_ID, heaviest_step
from .sampler import sample
from .staging import HostStaging, QueuedStaging, Staging
from .step_outputs import RunningStep, StepOutputs
from .support import usable_model_len

logger = logging.getLogger(__name__)


class ModelRunner:
    """Loads `config.model`, allocates the whole KV pool once and computes steps. One thread at a time.

    On a device with a queue of its own (CUDA) a step is only queued by `launch`, and neither its inputs nor its outputs
    make the host wait. `queue` is what stands in for it in tests.

    The number of threads and, for float32, the highest matmul precision are set for the whole process: torch has no
    other way.

    Raises:
        InvalidConfigError: a setting and the model or the machine do not fit; the message has the numbers.
        UnsupportedModelError: the model cannot be served correctly (a kind of InvalidConfigError).
    """

    def __init__(self, config: EngineConfig, queue: DeviceQueue | None = None) -> None:
        started_s = time.monotonic()
        if (num_threads := config.num_threads or model_threads()) is not None:
            torch.set_num_threads(num_threads)
        self._device = choose_device(config.device)
        self._dtype = choose_dtype(config.dtype, self._device)
        if self._dtype == torch.float32:
            torch.set_float32_matmul_precision("highest")
        self._block_size = config.block_size
        self._queue = CudaQueue(self._device) if queue is None and self._device.type == "cuda" else queue
        self._staging: Staging = HostStaging() if self._queue is None else QueuedStaging(self._queue)
        self._sampled: SampledTokens | None = None
        self._graphs: DecodeGraphs | None = None
        self._adapter_graphs: DecodeGraphs | None = None
        self._adapters: ModelAdapters | None = None

        path = Path(config.model)
        model_config = load_config(path)
        check_quantization(config, model_config, self._dtype, self._device)
        kv_dtype = choose_kv_dtype(config, self._dtype)
        max_model_len = usable_model_len(model_config, config.max_model_len)
        self._model = load_model(path, model_config, self._dtype, self._device)
        self._rules = LogitRules(end_of_sequence_ids(self._model, model_config))
        shapes = probe_layers(self._model, model_config)
        groups = group_layers(shapes, max_model_len, one_group=config.disable_hybrid_kv_cache_manager)
        self._pool_layout = PoolLayout(shapes, groups, config.block_size, kv_dtype)
        self._pictures = Pictures.of(self._model, model_config) if takes_pictures(model_config) else None
        # Before the passes: afterwards a model has no forward of its own to compare with.
        if self._pictures is not None:
            check_pictures(
                self._model,
                model_config,
                self._pictures.encoder.num_deepstack,
                self._compute_alone,
            )
        targets = None
        if config.enable_lora:
            pictures = self._pictures is not None
            targets = AdapterTargets(self._model, model_config, config, takes_pictures=pictures)
        # Where steps are queued and computed apart, what is not torch's would not be.
        if self._queue is None:
            self._apply_passes(config, path, model_config, None if targets is None else targets.adapters)
        if targets is not None:
            self._adapters = ModelAdapters(self._model, targets, self._device, self._queue)
        # Of loading: weights as they were, and what brought them into another layout.
        give_back_freed_memory()
        num_blocks = choose_num_blocks(
            config,
            block_bytes=self._pool_layout.block_bytes,
            num_groups=len(groups),
            device=self._device,
            reserved_bytes=self._reserved_bytes(config, max_model_len) if self._device.type == "cuda" else 0,
        )
        self.pool = self._pool_layout.allocate(num_blocks, self._device)
        self._graphs = self._captured(config, max_model_len)
        if self._graphs is not None and self._adapters is not None:
            self._adapter_graphs = self._captured(config, max_model_len, self._adapters.rows)
        dtype_name = str(self._dtype).removeprefix("torch.")
        kv_dtype_name = dtype_name if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
        self.info = ModelInfo(
            name=config.model_name or path.resolve().name,
            vocab_size=_vocab_size(self._model, model_config),
            max_model_len=max_model_len,
            eos_token_ids=end_of_sequence_ids(self._model, model_config),
            num_blocks=num_blocks,
            cache_namespace=cache_namespace(
                model_fingerprint(path),
                dtype_name,
                kv_dtype_name,
                config.block_size,
                config.quantization,
                [group.layers for group in groups],
            ),
            tokenizer_digest=tokenizer_digest(path),
            multimodal=None if self._pictures is None else self._pictures.info,
            runs_apart=self._queue is not None,
            windows=self._pool_layout.windows,
            num_adapter_slots=0 if self._adapters is None else self._adapters.num_slots,
        )
        logger.info(
            "model_loaded name=%s dtype=%s quantization=%s device=%s threads=%d layers=%d kv_dtype=%s kv_groups=%s"
            " kv_wasted=%.3f blocks=%d kv_pool_bytes=%d adapter_slots=%d load_s=%.1f",
            self.info.name,
            dtype_name,
            config.quantization,
            self._device,
            torch.get_num_threads(),
            len(shapes),
            kv_dtype_name,
            described(groups),
            wasted_share(groups),
            num_blocks,
            sum(tensor.nbytes for tensor in self.pool.tensors),
            self.info.num_adapter_slots,
            time.monotonic() - started_s,
        )

    def _apply_passes(
        self, config: EngineConfig, path: Path, model_config: Any, adapters: LayerAdapters | None
    ) -> None:
        try:
            apply_passes(
                self._model,
                model_config,
                fuse=config.fuse_layers,
                pack=config.prepack_weights,
                kernel=config.linear_kernel,
                quantization=config.quantization,
                adapters=adapters,
            )
        except PassError as error:
            if config.quantization is not None:
                raise InvalidConfigError(
                    f"quantization: {model_config.model_type} in {config.quantization}: {error}"
                ) from error
            logger.warning("passes_skipped model_type=%s reason=%s", model_config.model_type, error)
        else:
            return
        # Not before the error is forgotten, which knows the broken model, nor with that still there.
        self._model = None
        self._model = load_model(path, model_config, self._dtype, self._device)
        self._pictures = None if self._pictures is None else Pictures.of(self._model, model_config)

    @torch.inference_mode()
    def copy_slots(self, copies: Sequence[SlotCopy]) -> None:
        """As `engine_core.runner.Runner.copy_slots`."""
        copy_slots(self.pool.tensors, *zip(*copies, strict=True))

    def check_features(self, features: Sequence[MultimodalFeature]) -> None:
        """As `engine_core.runner.Runner.check_features`."""
        if self._pictures is not None:
            self._pictures.check(features)

    def encode(
        self, feature: MultimodalFeature, inputs: Mapping[str, np.ndarray], adapter_slot: int | None = None
    ) -> EncodedRows:
        """As `engine_core.runner.Runner.encode`."""
        if self._pictures is None:
            raise ValueError(f"{self.info.name} takes no pictures")
        if self._adapters is None or adapter_slot is None:
            return self._pictures.encoder.encode(feature, inputs)
        return self._pictures.encoder.encode(feature, inputs, self._adapters.rows.of_picture(adapter_slot))

    def read_adapter(self, path: Path, root: Path | None = None) -> Adapter:
        """As `engine_core.runner.Runner.read_adapter`."""
        return self._ready_for_adapters.read(path, root)

    @torch.inference_mode()
    def place_adapter(self, slot: int, adapter: Adapter) -> None:
        """As `engine_core.runner.Runner.place_adapter`."""
        self._ready_for_adapters.place(slot, adapter)

    @torch.inference_mode()
    def clear_adapter(self, slot: int) -> None:
        """As `engine_core.runner.Runner.clear_adapter`."""
        self._ready_for_adapters.clear(slot)

    @property
    def _ready_for_adapters(self) -> ModelAdapters:
        if self._adapters is None:
            raise AdapterError(f"{self.info.name} was loaded without enable_lora", "lora_disabled", "lora_name")
        return self._adapters

    @torch.inference_mode()
    def launch(self, batch: Sequence[ScheduledRequest]) -> LaunchedStep:
        """As `engine_core.runner.Runner.launch`."""
        if self._adapters is not None:
            self._adapters.pace.step_begins()
        return self._launch(batch, self.pool)

    def _forward(
        self,
        batch: Sequence[ScheduledRequest],
        layout: StepLayout,
        sampled: SampledTokens | None,
        pool: KVPool,
    ) -> tuple[InputBatch, Callable[[Places], torch.Tensor]]:
        """The batch on the device, and `forward.step_logits` of it."""
        pictures = self._pictures
        inputs = build_input_batch(
            batch,
            layout,
            block_size=self._block_size,
            dtype=self._dtype,
            staging=self._staging,
            sampled=sampled,
            joins_touching=pictures is not None and pictures.joins_touching,
        )
        layer_kv = PagedKV(pool, inputs.metadata)
        positions = None if pictures is None else pictures.positions
        return inputs, step_logits(self._model, batch, inputs, layer_kv, positions, self._staging, self._adapters)

    def _launch(self, batch: Sequence[ScheduledRequest], pool: KVPool) -> RunningStep:
        outputs = StepOutputs(len(batch))
        sampled = None if batch[0].follows is None else self._sampled
        layout = lay_out(batch, self._pool_layout.windows, self._block_size, sampled)
        with self._staging.step():
            adapter_slots = slots_of_requests(batch)
            graphs = self._graphs if adapter_slots is None else self._adapter_graphs
            if graphs is not None and self._is_captured(batch, graphs):
                logits = graphs.logits(layout, sampled, self._staging, adapter_slots)
            else:
                inputs, logits_of = self._forward(batch, layout, sampled, pool)
                replays = any(item.request.prompt_logprobs is not None for item in batch)
                with decoding_once(self._model) if replays else nullcontext():
                    logits = logits_of(inputs.logits_places)
                    if replays:
                        add_prompt_logprobs(outputs, batch, logits_of, self._staging)
            self._sampled = None
            if layout.sampling:
                self._sample(batch, layout.sampling, logits, outputs)
            return outputs.send(self._staging)

    def _is_captured(self, batch: Sequence[ScheduledRequest], graphs: DecodeGraphs) -> bool:
        if not graphs.have_room_for(len(batch)) or not is_plain_decode(batch):
            return False
        has_positions = self._pictures is not None and self._pictures.positions is not None
        return not (has_positions and any(item.request.features for item in batch))

    def _sample(
        self, batch: Sequence[ScheduledRequest], sampling: list[int], logits: torch.Tensor, outputs: StepOutputs
    ) -> None:
        rows = [batch[index] for index in sampling]
        tokens = sample(self._rules.apply(logits, rows, self._staging), rows, self._staging)
        self._sampled = SampledTokens(tokens, {index: row for row, index in enumerate(sampling)})

        def read(result: StepResult, tensors: Sequence[torch.Tensor]) -> None:
            for index, token in zip(sampling, tensors[0].tolist(), strict=True):
                result.token_ids[index] = token

        outputs.add([tokens], read)
        add_sampled_logprobs(outputs, batch, sampling, logits, tokens, self._staging)

    def _compute_alone(self, item: ScheduledRequest) -> torch.Tensor:
        """Logits of all tokens of a request without blocks, `[num_tokens, vocab_size]`, in a cache of their own that is
        not quantized.
        """
        windows, num_blocks = self._pool_layout.windows, -(-item.num_tokens // self._block_size)
        tables = [range(first, first + num_blocks) for first in range(0, len(windows) * num_blocks, num_blocks)]
        batch = [dataclasses.replace(item, block_tables=tables)]
        layout = lay_out(batch, windows, self._block_size, None)
        with self._staging.step():
            unquantized = dataclasses.replace(self._pool_layout, dtype=self._dtype)
            pool = unquantized.allocate(len(windows) * num_blocks, self._device)
            _, logits_of = self._forward(batch, layout, None, pool)
            places = np.arange(item.num_tokens)
            return logits_of(Places(places, torch.from_numpy(places).to(self._device)))

    def _captured(
        self, config: EngineConfig, max_model_len: int, adapter_rows: AdapterRows | None = None
    ) -> DecodeGraphs | None:
        graphs = self._make_graphs(config, max_model_len, self.pool, adapter_rows)
        return graphs if graphs is not None and capture_all(graphs) else None

    def _make_graphs(
        self, config: EngineConfig, max_model_len: int, pool: KVPool, adapter_rows: AdapterRows | None = None
    ) -> DecodeGraphs | None:
        """Graphs of decodes, to be captured; None where there is no queue, or attention looks at a step's numbers on
        the host, as it does in torch.
        """
        sizes = capture_sizes(config)
        computes_apart = uses_triton(next(self._model.parameters()))
        if self._queue is None or not computes_apart or config.enforce_eager or not sizes:
            return None
        return DecodeGraphs(
            self._model,
            self._queue,
            pool,
            sizes=sizes,
            max_blocks=-(-max_model_len // self._block_size),
            block_size=self._block_size,
            dtype=self._dtype,
            adapter_rows=adapter_rows,
        )

    @torch.inference_mode()
    def _rehearse(self, config: EngineConfig, max_model_len: int) -> None:
        """Compute the heaviest step, sampling included, in a cache of its own."""
        pool = self._pool_layout.allocate(SCRATCH_BLOCK_ID + 1, self._device)
        for tensor in pool.tensors:
            tensor.zero_()
        self._launch(heaviest_step(config, max_model_len, len(self._pool_layout.groups)), pool).wait()

    def _reserved_bytes(self, config: EngineConfig, max_model_len: int) -> int:
        """What a step, the graphs and the encoder cache need besides the KV pool."""
        step_bytes = self._measure_step(config, max_model_len)
        scratch = self._pool_layout.allocate(SCRATCH_BLOCK_ID + 1, self._device)
        for rows in (None,) if self._adapters is None else (None, self._adapters.rows):
            graphs = self._make_graphs(config, max_model_len, scratch, rows)
            if graphs is not None:
                step_bytes += measure_all(graphs, self._device)
                # Else what they took would count as in use.
                del graphs
                torch.cuda.empty_cache()
        if self._pictures is None:
            return step_bytes
        return step_bytes + encoder_cache_bytes(config, self._pictures.info.embed_bytes)

    def _measure_step(self, config: EngineConfig, max_model_len: int) -> int:
        """Bytes of CUDA memory the heaviest step needs beyond the weights.

        Raises:
            InvalidConfigError: there are not that many.
        """
        before_bytes = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        try:
            self._rehearse(config, max_model_len)
        except torch.OutOfMemoryError as error:
            raise InvalidConfigError(
                f"{self._device} has no memory for a step with max_num_batched_tokens={config.max_num_batched_tokens},"
                f" max_num_seqs={config.max_num_seqs} and max_model_len={max_model_len}; lower one of them ({error})"
            ) from error
        peak_bytes = torch.cuda.max_memory_allocated(self._device) - before_bytes
        torch.cuda.empty_cache()
        return peak_bytes


def _vocab_size(model: Any, model_config: Any) -> int:
    """Ids that have an embedding and are meant to."""
    rows = model.get_input_embeddings().num_embeddings
    return min(rows, model_config.get_text_config(decoder=True).vocab_size)
