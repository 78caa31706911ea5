"""`SpeechTokens`: the special tokens of a checkpoint of the Whisper kind, and what its files say of their use."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compile_and_serve.runtime.audio.options import TranscriptionError
from compile_and_serve.runtime.json_files import read_json_object

SECONDS_PER_TIMESTAMP = 0.02
ALIGNMENT_REFUSED = "alignment_refused"  # in a config: why no times of words are computed, as a clause
# ISO 639-1 codes (and two of ISO 639-3) of the languages that Whisper knows, with their English names.
LANGUAGES = dict(
    pair.split(":")
    for pair in (
        "en:english zh:chinese de:german es:spanish ru:russian ko:korean fr:french ja:japanese pt:portuguese tr:turkish pl:polish "
        "ca:catalan nl:dutch ar:arabic sv:swedish it:italian id:indonesian hi:hindi fi:finnish vi:vietnamese he:hebrew uk:ukrainian "
        "el:greek ms:malay cs:czech ro:romanian da:danish hu:hungarian ta:tamil no:norwegian th:thai ur:urdu hr:croatian bg:bulgarian "
        "lt:lithuanian la:latin mi:maori ml:malayalam cy:welsh sk:slovak te:telugu fa:persian lv:latvian bn:bengali sr:serbian "
        "az:azerbaijani sl:slovenian kn:kannada et:estonian mk:macedonian br:breton eu:basque is:icelandic hy:armenian ne:nepali "
        "mn:mongolian bs:bosnian kk:kazakh sq:albanian sw:swahili gl:galician mr:marathi pa:punjabi si:sinhala km:khmer sn:shona "
        "yo:yoruba so:somali af:afrikaans oc:occitan ka:georgian be:belarusian tg:tajik sd:sindhi gu:gujarati am:amharic yi:yiddish "
        "lo:lao uz:uzbek fo:faroese ht:haitian_creole ps:pashto tk:turkmen nn:nynorsk mt:maltese sa:sanskrit lb:luxembourgish "
        "my:myanmar bo:tibetan tl:tagalog mg:malagasy as:assamese tt:tatar haw:hawaiian ln:lingala ha:hausa ba:bashkir jw:javanese "
        "su:sundanese yue:cantonese"
    ).split()
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeechTokens:
    """Ids. start, end: of a transcript. previous: begins the prompt; None: there is none. timestamps: the token of 0 seconds; those behind
    it are 20 ms apart. languages: by code; empty: the model knows English alone, and no tasks. suppressed: never sampled;
    suppressed_first: not as the first token. max_initial: timestamps up to that number may be first; None: any.
    """

    start: int
    end: int
    previous: int | None
    no_speech: int
    no_timestamps: int
    languages: dict[str, int] = field(default_factory=dict)
    tasks: dict[str, int] = field(default_factory=dict)
    suppressed: list[int] = field(default_factory=list)
    suppressed_first: list[int] = field(default_factory=list)
    max_initial: int | None = None

    @classmethod
    def read(cls, folder: Path) -> SpeechTokens:
        """From tokenizer.json and generation_config.json. Raises `TranscriptionError` where they lack a token."""
        ids = _added_tokens(folder)
        config = _read(folder / "config.json") | _read(folder / "generation_config.json")

        def required(name: str) -> int:
            if name not in ids:
                raise TranscriptionError(f"{folder.name}/tokenizer.json has no token {name}: the model transcribes nothing without it.")
            return ids[name]

        no_timestamps = required("<|notimestamps|>")
        is_multilingual = bool(config.get("is_multilingual", len(config.get("lang_to_id") or ()) > 1))
        return cls(
            start=required("<|startoftranscript|>"),
            end=required("<|endoftext|>"),
            previous=ids.get("<|startofprev|>"),
            no_speech=ids.get("<|nospeech|>", ids.get("<|nocaptions|>", no_timestamps - 1)),
            no_timestamps=no_timestamps,
            languages={code: ids[f"<|{code}|>"] for code in LANGUAGES if f"<|{code}|>" in ids} if is_multilingual else {},
            tasks={task: ids[f"<|{task}|>"] for task in ("transcribe", "translate") if f"<|{task}|>" in ids} if is_multilingual else {},
            suppressed=[int(one) for one in config.get("suppress_tokens") or ()],
            suppressed_first=[int(one) for one in config.get("begin_suppress_tokens") or ()],
            max_initial=config.get("max_initial_timestamp_index", 50),
        )

    @property
    def timestamps(self) -> int:
        return self.no_timestamps + 1

    def language_of(self, name: str) -> str:
        """The code of a language by code or English name. Raises `TranscriptionError` for one that the model does not know."""
        wanted = name.strip().lower().replace(" ", "_")
        code = wanted if wanted in LANGUAGES else next((code for code, known in LANGUAGES.items() if known == wanted), None)
        if code is None or code not in (self.languages or {"en": 0}):
            known = ", ".join(self.languages) or "en"
            raise TranscriptionError(f"The model does not know the language {name!r:.50}: it knows {known}.")
        return code


def _added_tokens(folder: Path) -> dict[str, int]:
    return {str(one["content"]): int(one["id"]) for one in _read(folder / "tokenizer.json").get("added_tokens") or ()}


def _read(file: Path) -> dict[str, Any]:
    return read_json_object(file, TranscriptionError)
