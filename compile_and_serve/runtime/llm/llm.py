"""Offline use without a server: `LLM(model).generate(prompts, SamplingParams(...))`. Names and results are those of vLLM."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from compile_and_serve.custom_ops.step_data import MediaItem, StepArray
from compile_and_serve.runtime.audio.transcriber import Decode, Decoded
from compile_and_serve.runtime.beam_search import BeamSearch, BeamSearchParams
from compile_and_serve.runtime.llm.actions import ActionMethods
from compile_and_serve.runtime.llm.beams import BeamSearchOutput, beam_search_output
from compile_and_serve.runtime.llm.pooling import Output, PooledPrompt, PoolingMethods, PoolingRequestOutput
from compile_and_serve.runtime.llm.progress import Progress
from compile_and_serve.runtime.llm.prompts import Message, Prompt, PromptReader, StartedPrompt
from compile_and_serve.runtime.llm.tools import ChatTools
from compile_and_serve.runtime.llm.transcription import TranscriptionMethods
from compile_and_serve.runtime.lora.request import LoRARequest
from compile_and_serve.runtime.messages import EngineInfo, FinishReason, StepData, TokenLogprobs, ignore_stage
from compile_and_serve.runtime.options import make_engine_config
from compile_and_serve.runtime.parsers.events import Call
from compile_and_serve.runtime.pooling.results import check_generates
from compile_and_serve.runtime.pooling_params import Pooled, PoolingParams
from compile_and_serve.runtime.sampling_params import SamplingParams
from compile_and_serve.runtime.text.input_processor import InputProcessor
from compile_and_serve.runtime.text.load_tokenizer import load_model_tokenizer
from compile_and_serve.runtime.text.output_processor import CompletionDelta, OutputProcessor
from compile_and_serve.runtime.text.output_processor import CompletionOutput as Completion
from compile_and_serve.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from compile_and_serve.runtime.engine.client import SyncEngine
    from compile_and_serve.runtime.engine.core import EngineCore
    from compile_and_serve.runtime.engine.sync_replicas import SyncReplicas
    from compile_and_serve.runtime.text.template_pool import TemplatePool


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log-probability (natural log), its 1-based rank, and its text (None without a tokenizer)."""

    logprob: float
    rank: int
    decoded_token: str | None


@dataclass(slots=True)
class CompletionOutput:
    """One completion.

    cumulative_logprob: sum over the chosen tokens. logprobs: for each token, token id → `Logprob`, the chosen token first.
    tool_calls: the complete calls in the text of `LLM.chat` with tools.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    tool_calls: list[Call] = field(default_factory=list)


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its `n` completions. prompt: None if only token ids were given. prompt_logprobs[0] is None."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    finished: bool = True


@dataclass(slots=True)
class _Job:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    pooling: PoolingParams | None = None
    step_data: StepData = field(default_factory=dict)
    step_arrays: dict[str, StepArray] = field(default_factory=dict)
    media: list[MediaItem] = field(default_factory=list)
    started: StartedPrompt | None = None  # what the other fields will be read from, once its media are prepared
    completions: list[Completion] = field(default_factory=list)
    unfinished: int = 0
    fill: Callable[[_Job], None] | None = None  # sets the prompt's fields: a pooling job's prompt is prepared when it is its turn
    convert: Callable[[Pooled], Any] | None = None  # makes `result` of what is pooled, while the device computes other jobs
    result: Any = None

    @property
    def is_ready(self) -> bool:
        """Whether it can run without waiting for its media."""
        return self.started is None or self.started.is_ready


class InvalidRequestError(ValueError, RuntimeError):
    """A request that turned out to be wrong only while it was prepared or ran, such as one with an adapter that cannot be used."""


class LLM(PoolingMethods, TranscriptionMethods, ActionMethods):
    """A model in this process, or replicas of it in processes of their own (`data_parallel_size`). `shutdown`, or leaving a `with` block,
    frees its memory.

    options: those of `make_engine_config`, the fields of `EngineConfig`.
    on_stage: called with (stage, seconds, detail) at the end of each stage of the start-up.
    """

    def __init__(self, model: str, *, on_stage: Callable[[str, float, str], None] | None = None, **options: Any) -> None:
        from compile_and_serve.runtime.engine.client import SyncEngine
        from compile_and_serve.runtime.engine.sync_replicas import SyncReplicas

        config = make_engine_config(model, **options)
        self.tokenizer: Tokenizer | None = None if config.model.skip_tokenizer_init else load_model_tokenizer(config.model)
        engine = SyncEngine if config.parallel.data_parallel_size == 1 else SyncReplicas
        self.engine: SyncEngine | SyncReplicas = engine(config, on_stage=on_stage or ignore_stage)
        self._inputs = InputProcessor(self.tokenizer, self.engine.info)
        self._prompts = PromptReader(self._inputs, self.engine.info)
        self._outputs = OutputProcessor(self._inputs)
        self._num_requests = 0
        self._templates: TemplatePool | None = None  # starts a process, so only a conversation makes it

    @property
    def info(self) -> EngineInfo:
        """The engine's limits, KV blocks, dtype and device."""
        return self.engine.info

    @property
    def core(self) -> EngineCore:
        """The engine core, for tools that look inside. Raises `EngineDeadError` after `shutdown`."""
        from compile_and_serve.runtime.engine.client import SyncEngine

        assert isinstance(self.engine, SyncEngine), "the cores of replicas are in other processes"
        return self.engine.core

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises `ValueError` if the LLM was created with skip_tokenizer_init."""
        return self._inputs.require_tokenizer("get_tokenizer")

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        step_data: Sequence[StepData] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt. The results are in the order of the prompts.

        prompts: text, {"prompt": text} or {"prompt_token_ids": [...]}, one or many, with images as "multi_modal_data".
        sampling_params: one for all, or one for each prompt.
        use_tqdm: show a progress bar. priority: one for each prompt, lower runs first (policy "priority").
        step_data: for each prompt, what step inputs of a model or a pass are filled from (docs/add-a-pass.md).
        lora_request: the adapter of all prompts, or of each; needs `LLM(…, enable_lora=True)`.
        Raises `ValueError` before anything runs if a prompt or a parameter is wrong, and `RuntimeError` if one fails. Media are prepared
        while other prompts run, so that `ValueError` for one that cannot be used comes later, and ends all prompts.
        """
        check_generates(self.info)
        many: Sequence[Prompt] = [prompts] if isinstance(prompts, (str, Mapping)) else list(prompts)
        jobs = self._jobs(many, _params(sampling_params, len(many)))
        if lora_request is None or isinstance(lora_request, LoRARequest):
            lora_request = [lora_request] * len(jobs)
        for job, data in zip(jobs, step_data or (), strict=bool(step_data)):
            job.step_data = data
        self._run(jobs, priority or [0] * len(jobs), lora_request, show_progress=use_tqdm)
        return [self._result(job) for job in jobs]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """`generate` for conversations.

        messages: one list of {"role": …, "content": …}, or a list of such lists. Parts of contents may be images: {"type": "image_url",
        …} as in OpenAI's API, or {"type": "image", "image": a PIL image or an array}. mm_processor_kwargs: for all of them.
        tools, tool_choice, parallel_tool_calls: as in
        OpenAI's API (docs/tool-calls.md). The calls are in `CompletionOutput.tool_calls`, and the text has them as generated.
        The other arguments are those of `generate` and `render_chat`. Also raises `ChatTemplateError` and `ToolUseError`, which are
        `ValueError`s. The template is the checkpoint's, so it runs in a process with a deadline of 10 seconds a conversation and a
        memory limit.
        """
        if not messages:
            raise ValueError("messages must hold at least one message.")
        conversations: Any = [messages] if isinstance(messages[0], Mapping) else messages
        tokenizer = self._inputs.require_tokenizer("a conversation")
        given = _params(sampling_params, len(conversations))
        use: ChatTools | None = None
        if tools or tool_choice is not None:
            use = ChatTools(tokenizer, tools, tool_choice, parallel=parallel_tool_calls, chat_template=chat_template)
        prompts: list[Prompt] = []
        texts, params = list[str](), list[SamplingParams]()
        for conversation, wanted in zip(conversations, given, strict=True):
            marked, taken = self._prompts.take(conversation)
            shown, shown_tools = (marked, ()) if use is None else use.show(marked)
            text = self._template_pool().render(
                tokenizer,
                self._prompts.show(shown, taken),
                template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=shown_tools or None,
                template_kwargs=chat_template_kwargs,
            )
            texts.append(text)
            params.append(wanted if use is None else use.params(wanted, text))
            prompts.append(self._prompts.of_chat(text, taken, mm_processor_kwargs))
        with nullcontext() if use is None else use.errors():
            results = self.generate(prompts, params, use_tqdm=use_tqdm, lora_request=lora_request)
        if use is not None:
            for text, result in zip(texts, results, strict=True):
                for output in result.outputs:
                    output.tool_calls = use.calls(text, output.text)
        return results

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
        lora_request: LoRARequest | None = None,
    ) -> list[BeamSearchOutput]:
        """The `beam_width` likeliest continuations of every prompt, best first. Errors are those of `generate`."""
        check_generates(self.info)
        many: Sequence[Prompt] = [prompts] if isinstance(prompts, (str, Mapping)) else list(prompts)
        limits = SamplingParams(temperature=0.0, max_tokens=params.max_tokens, detokenize=False)
        starts = self._jobs(many, [limits] * len(many))
        if any(start.started is not None or start.media for start in starts):
            _cancel(starts)
            raise ValueError("Beam search reads no images: use generate.")
        if self.info.max_source_len is not None:
            raise ValueError("Beam search does not run models whose encoder reads the prompt: use generate.")
        end_ids = [] if params.ignore_eos or self.tokenizer is None else self.tokenizer.eos_token_ids
        searches = [
            BeamSearch(width=params.beam_width, max_tokens=params.max_tokens, end_ids=end_ids, length_penalty=params.length_penalty)
            for _ in starts
        ]
        while any(search.alive for search in searches):
            jobs = [
                self._new_job([*start.prompt_token_ids, *beam.token_ids], search.step_params)
                for start, search in zip(starts, searches, strict=True)
                for beam in search.alive
            ]
            count = len(jobs)
            self._run(jobs, [0] * count, [lora_request] * count, show_progress=use_tqdm)
            left = iter(jobs)
            for search in searches:
                entries = [next(left).completions[0].logprobs for _ in search.alive]
                search.advance([entry[0] for entry in entries if entry is not None])
        return [
            beam_search_output(start.prompt_token_ids, search, self.tokenizer, params)
            for start, search in zip(starts, searches, strict=True)
        ]

    def sleep(self, level: int = 1) -> None:
        """Free the KV cache and the weights until `wake_up`. Cached prefixes are forgotten.

        level: 1 keeps the weights in host memory, 2 drops them, and waking reads the checkpoint again.
        """
        self.engine.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Bring back what `sleep` freed, or only the parts in `tags`: "weights", "kv_cache"."""
        self.engine.wake_up(tags)

    @property
    def is_sleeping(self) -> bool:
        """Whether memory is freed, so that nothing can be generated."""
        return self.engine.is_sleeping

    def shutdown(self) -> None:
        """Stop the engine and free its memory. The LLM cannot be used afterwards."""
        if self._templates is not None:
            self._templates.close()
        self._prompts.close()
        self.engine.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.shutdown()

    def _template_pool(self) -> TemplatePool:
        if self._templates is None:
            from compile_and_serve.runtime.text.template_pool import TemplatePool  # slow to import

            self._templates = TemplatePool()
            weakref.finalize(self, self._templates.close)
        return self._templates

    def _jobs(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[_Job]:
        """The media of all prompts are prepared at once. Those without any are ready."""
        jobs: list[_Job] = []
        try:
            for prompt, wanted in zip(prompts, params, strict=True):
                job = self._new_job([], wanted)
                job.started = self._prompts.start(prompt, wanted)
                jobs.append(job)
                if not job.started.media:
                    self._finish(job)
        except BaseException:
            _cancel(jobs)
            raise
        return jobs

    def _finish(self, job: _Job) -> None:
        """Read the job's prompt. Waits for its media."""
        if job.fill is not None:
            job.fill(job)
            job.fill = None
        if job.started is None:
            return
        read, job.started = self._prompts.finish(job.started), None
        params = read.params
        if self.tokenizer is None and params.detokenize:
            params = msgspec.structs.replace(params, detokenize=False)
        job.prompt, job.step_arrays, job.media = read.text, read.step_arrays, read.media
        job.prompt_token_ids, job.params = self._inputs.prepare(read.prompt, params)

    def _new_job(self, token_ids: list[int], params: SamplingParams) -> _Job:
        self._num_requests += 1
        return _Job(str(self._num_requests - 1), None, token_ids, params)

    def _decode(self, jobs: Sequence[Decode]) -> list[Decoded]:
        asked = []
        for one in jobs:
            ids, params = self._inputs.prepare(one.prompt_token_ids, one.params)
            asked.append(self._new_job(ids, params))
            asked[-1].media = one.media
        count = len(asked)
        self._run(asked, [0] * count, [None] * count, show_progress=False)
        return [Decoded.of(job.completions[0]) for job in asked]

    def _pool(
        self,
        prompts: Iterable[PooledPrompt],
        count: int,
        lora_request: LoRARequest | None,
        convert: Callable[[np.ndarray], Output],
        *,
        show_progress: bool,
    ) -> list[PoolingRequestOutput[Output]]:
        coming = iter(prompts)

        def fill(job: _Job) -> None:
            prompt = next(coming)
            job.prompt_token_ids, job.params, job.pooling = prompt.token_ids, prompt.sampling, prompt.pooling
            job.step_data, job.convert = prompt.step_data, partial(self._converted, prompt.pooling, convert)

        jobs = [self._new_job([], SamplingParams()) for _ in range(count)]
        for job in jobs:
            job.fill = fill
        self._run(jobs, [0] * count, [lora_request] * count, show_progress=show_progress)
        return [PoolingRequestOutput(job.request_id, job.prompt_token_ids, job.result) for job in jobs]

    def _run(self, jobs: list[_Job], priorities: Sequence[int], adapters: Sequence[LoRARequest | None], *, show_progress: bool) -> None:
        """Run every job to its end. Those that are not prepared yet follow while the others run."""
        engine_ids: list[str] = []
        waiting = deque(zip(jobs, priorities, adapters, strict=True))
        tokens_ahead, added = self.engine.tokens_ahead, 0
        with Progress(len(jobs), show_progress) as progress:
            try:
                while waiting or len(self._outputs):
                    while waiting and (waiting[0][0].is_ready or not len(self._outputs)):
                        job, priority, lora = waiting.popleft()
                        self._finish(job)
                        sink = self._start(job, progress)
                        request = self._outputs.add(
                            job.request_id,
                            job.prompt_token_ids,
                            job.params,
                            sink,
                            priority=priority,
                            step_data=job.step_data,
                            lora=lora,
                            pooling=job.pooling,
                        )
                        request.step_arrays, request.media = job.step_arrays, job.media
                        engine_ids += request.request_ids
                        self.engine.add_request(request)
                        added += len(job.prompt_token_ids)
                        if 0 < tokens_ahead <= added:
                            self._step()
                            added -= tokens_ahead // 2
                    if not len(self._outputs):
                        continue
                    assert self.engine.has_work(), "the engine lost requests"
                    self._step()
            finally:  # an interrupt must not leave requests in the engine
                _cancel([job for job, *_ in waiting])
                left = self._outputs.forget(engine_ids)
                if left:
                    self.engine.abort(left)
        for job in jobs:
            failed = next((c for c in job.completions if c.error is not None), None)
            if failed is not None:
                kind = InvalidRequestError if failed.error_kind == "invalid" else RuntimeError
                raise kind(f"Request {job.request_id} failed: {failed.error}")

    def _step(self) -> None:
        if to_abort := self._outputs.process(self.engine.step().outputs):
            self.engine.abort(to_abort)

    def _start(self, job: _Job, progress: Progress) -> Callable[[CompletionDelta], None]:
        job.completions = [Completion(index) for index in range(job.params.n)]
        job.unfinished = job.params.n

        def sink(delta: CompletionDelta) -> None:
            completion = job.completions[delta.index]
            completion.add(delta)
            if delta.prompt_logprobs is not None or (delta.token_ids and len(completion.token_ids) == len(delta.token_ids)):
                progress.prompt_done(len(job.prompt_token_ids) if delta.index == 0 else 0)
            progress.tokens(len(delta.token_ids))
            if delta.finish_reason is not None:
                job.unfinished -= 1
                if job.unfinished == 0:
                    if job.convert is not None and completion.pooled is not None:
                        job.result = job.convert(completion.pooled)
                    progress.request_done()

        return sink

    def _result(self, job: _Job) -> RequestOutput:
        first = job.completions[0]
        prompt_logprobs = None
        if first.prompt_logprobs is not None:
            prompt_logprobs = [None if entry is None else self._logprobs(entry) for entry in first.prompt_logprobs]
        return RequestOutput(
            request_id=job.request_id,
            prompt=job.prompt,
            prompt_token_ids=job.prompt_token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=[self._completion(completion) for completion in job.completions],
            num_cached_tokens=first.num_cached_tokens,
        )

    def _completion(self, completion: Completion) -> CompletionOutput:
        entries = completion.logprobs
        return CompletionOutput(
            index=completion.index,
            text=completion.text,
            token_ids=completion.token_ids,
            cumulative_logprob=None if entries is None else sum(entry.logprobs[0] for entry in entries),
            logprobs=None if entries is None else [self._logprobs(entry) for entry in entries],
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
        )

    def _logprobs(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        result: dict[int, Logprob] = {}
        for position, (token_id, logprob) in enumerate(zip(entry.ids, entry.logprobs, strict=True)):
            rank = entry.rank_at(position)
            text = None if self.tokenizer is None else self.tokenizer.token_text(token_id)
            result.setdefault(token_id, Logprob(logprob, rank, text))
        return result


def _cancel(jobs: Sequence[_Job]) -> None:
    """Prepare no more media of jobs that will not run."""
    for job in jobs:
        if job.started is not None:
            job.started.cancel()


def _params(given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
    if given is None:
        given = SamplingParams()
    if isinstance(given, SamplingParams):
        return [given] * count
    if len(given) != count:
        raise ValueError(f"There are {count} prompts but {len(given)} sampling_params: give one for all, or one for each prompt.")
    return list(given)
