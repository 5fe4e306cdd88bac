# Ten words, spoken by voices of espeak-ng, as sequences of raw samples, for classifiers with any mechanism.
"""No package was found that ships recordings of the same words by many people, so they are synthesised: each word by
every voice in every accent, at several speeds and pitches, in 0.8 s of 6400 samples, with noise and at changing places.
Voices that are held out are not heard while learning. A token is a frame of 80 samples, 20 after the one before,
through filters that are learned."""

import hashlib
import io
import math
import shutil
import subprocess
import sys
import wave
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tasks"))
from classifier import Data, Task
from layer import S4D, SELECTIVE_SCAN, TURNED_QKV, VALUE, Input, Mechanism
from training import MODELS, need, stop

WORDS = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go")
RATE, SAMPLES = 8000, 6400  # per second, and of a sequence
FRAME, HOP, BANDS = 80, 20, 40  # samples of a frame, and to the next; filters
TOKENS = SAMPLES // HOP
WINDOW = 32  # tokens to either side that attention sees

ACCENTS = ("en-us", "en-gb", "en-gb-scotland", "en-gb-x-rp", "en-gb-x-gbclan", "en-gb-x-gbcwmd", "en-029")
VOICES = ("m1", "m2", "m4", "m5", "m6", "m8", "f1", "f3", "f4", "klatt", "klatt2", "Andy", "Annie", "belinda", "Denis",
          "Jacky")
HELD_OUT = ("m3", "m7", "f2", "f5", "klatt4", "edward")
MANNERS = ((135, 40), (175, 60))  # words per minute, pitch


def kernels(heads: int, channels: int, taps: int) -> Tensor:
    """Kernels of a long convolution: noise that decays within 4 tokens in the first channel, within all in the last."""
    fade = torch.logspace(math.log10(4), math.log10(taps), heads * channels).unflatten(0, (heads, channels))[..., None]
    return torch.randn(heads, channels, taps) * torch.exp(-torch.arange(taps) / fade) * fade**-0.5


# The mechanisms, each with what it takes; classify.cc has the same table.
MECHANISMS = {
    "none": Mechanism({"v": VALUE}),
    "windowed_attention": Mechanism(TURNED_QKV, {"window": (WINDOW, WINDOW)}, key=16, function="attention"),
    "selective_scan": SELECTIVE_SCAN,
    "s4d": S4D,
    "long_convolution": Mechanism({"u": VALUE, "kernel": Input("VT", constant=True, start=kernels)}, scan=True),
}


class Frames(nn.Module):
    """Filters in pairs, of which each begins as a tone under a window, cosine and sine: the logarithm of their energy
    does not depend on where in its period a tone is."""

    def __init__(self, width: int):
        super().__init__()
        tones = torch.logspace(math.log10(120), math.log10(3600),
                               BANDS)[:, None] * torch.arange(FRAME) * (2 * math.pi / RATE)
        window = torch.hann_window(FRAME) / math.sqrt(FRAME)
        self.filters, self.project = nn.Linear(FRAME, 2 * BANDS, bias=False), nn.Linear(BANDS, width)
        self.filters.weight.data = torch.cat([tones.cos() * window, tones.sin() * window])

    def forward(self, samples: Tensor) -> Tensor:
        frames = F.pad(samples, (0, FRAME - HOP)).unfold(1, FRAME, HOP)
        cosine, sine = self.filters(frames).chunk(2, -1)
        return self.project(torch.log(cosine.square() + sine.square() + 1e-3))


class Spoken(NamedTuple):
    word: int
    accent: str
    voice: str
    speed: int
    pitch: int

    def command(self, program: str) -> list[str]:
        voice = f"{self.accent}+{self.voice}"
        return [program, "-v", voice, "-s", str(self.speed), "-p", str(self.pitch), "--stdout", WORDS[self.word]]


def resampled(samples: np.ndarray, rate: int) -> np.ndarray:
    """At RATE, by its Fourier coefficients."""
    count = round(len(samples) * RATE / rate)
    return np.fft.irfft(np.fft.rfft(samples)[: count // 2 + 1], count) * (count / len(samples))


def samples_of(file: bytes) -> np.ndarray:
    """The samples of a WAV file without leading and trailing silence, of loudness 1, as int16 of which 4096 is 1.

    They are cut or padded with silence to SAMPLES.
    """
    with wave.open(io.BytesIO(file)) as sound:
        rate, frames = sound.getframerate(), sound.readframes(1 << 24)
    samples = resampled(np.frombuffer(frames, "<i2").astype(np.float64), rate)
    loud = np.flatnonzero(np.abs(samples) > 0.02 * np.abs(samples).max())
    if not len(loud):
        stop("espeak-ng said nothing, expected a word")
    samples = samples[loud[0] : loud[-1] + 1][:SAMPLES]
    samples = samples / np.sqrt(np.mean(samples**2))
    return np.pad(np.clip(np.round(4096 * samples), -32768, 32767), (0, SAMPLES - len(samples))).astype(np.int16)


def all_spoken(voices: tuple[str, ...]) -> list[Spoken]:
    return [Spoken(word, accent, voice, *manner) for voice in voices for accent in ACCENTS for manner in MANNERS
            for word in range(len(WORDS))]


def check_voices(program: str) -> None:
    """espeak-ng takes an unknown voice for the usual one, and says nothing."""
    for kind, column, names in (("variant", -1, VOICES + HELD_OUT), ("en", 1, ACCENTS)):
        listed = subprocess.run([program, f"--voices={kind}"], capture_output=True, text=True,
                                check=True).stdout.splitlines()
        known = {line.split()[column].removeprefix("!v/") for line in listed}
        for name in names:
            if name not in known:
                stop(f"espeak-ng has no voice {name}, expected one that has: 1.51 is known to")


def synthesised(folder: Path = MODELS / "speech") -> tuple[np.ndarray, np.ndarray]:
    """The words of VOICES and of HELD_OUT, [N, SAMPLES] each, said by espeak-ng or as they were kept."""
    program = shutil.which("espeak-ng")
    if program is None:
        stop("needs the program espeak-ng, which is not installed: apt-get install espeak-ng")
    check_voices(program)
    version = subprocess.run([program, "--version"], capture_output=True, text=True,
                             check=True).stdout.split("Data at")[0].strip()
    wanted = all_spoken(VOICES + HELD_OUT)
    key = hashlib.sha256(repr((version, WORDS, wanted, SAMPLES, RATE)).encode()).hexdigest()[:12]
    kept = folder / f"words-{key}.npy"
    if not kept.exists():
        print(f"{version}: {len(wanted)} words to say, kept in {kept}", flush=True)

        def say(spoken: Spoken) -> np.ndarray:
            return samples_of(subprocess.run(spoken.command(program), capture_output=True, check=True).stdout)

        said = []
        with ThreadPoolExecutor() as threads:
            for samples in threads.map(say, wanted):
                said.append(samples)
                if len(said) % 500 == 0:
                    print(f"said {len(said)} of {len(wanted)}", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        new = kept.with_suffix(".new.npy")
        np.save(new, np.stack(said))
        new.replace(kept)
    words, learned = np.load(kept), len(all_spoken(VOICES))
    return words[:learned], words[learned:]


def heard(words: Tensor, draws: torch.Generator) -> Tensor:
    """Each word at a place of its own and with noise, 5 to 25 decibels below it."""
    number, quiet = len(words), (words.flip(1) != 0).int().argmax(1)  # samples of silence at the end
    by = (torch.rand(number, generator=draws) * quiet).long()
    at = (torch.arange(SAMPLES) - by[:, None]) % SAMPLES
    noise = torch.randn(words.shape, generator=draws) * 10 ** (-(5 + 20 * torch.rand(number, 1, generator=draws)) / 20)
    return words.gather(1, at) + noise


def load() -> Data:
    learned, held_out = (words.astype(np.float32) / 4096 for words in synthesised())
    classes = [np.array([spoken.word for spoken in all_spoken(voices)]) for voices in (VOICES, HELD_OUT)]
    held_out = heard(torch.from_numpy(held_out), torch.Generator().manual_seed(0)).numpy()
    return Data(learned, classes[0], held_out, classes[1])


def spectrum(samples: np.ndarray) -> np.ndarray:
    """The mean over time of the logarithm of the power in 129 bands."""
    frames = np.lib.stride_tricks.sliding_window_view(samples, 256, 1)[:, ::128] * np.hanning(256)
    return np.log(np.abs(np.fft.rfft(frames)) ** 2 + 1e-3).mean(1)


def baselines(data: Data) -> dict[str, float]:
    linear_model, pipeline, preprocessing = (need(f"sklearn.{name}", "scikit-learn")
                                             for name in ("linear_model", "pipeline", "preprocessing"))
    model: Any = pipeline.make_pipeline(preprocessing.StandardScaler(),
                                        linear_model.LogisticRegression(C=0.1, max_iter=2000))
    learned = heard(torch.from_numpy(data.train_x), torch.Generator().manual_seed(1)).numpy()
    model.fit(spectrum(learned), data.train_y)
    return {"chance": 1 / len(WORDS),
            "logistic regression on the mean spectrum": float(model.score(spectrum(data.test_x), data.test_y))}


TASK = Task(name="speech", result="speech", labels=WORDS, tokens=TOKENS, mechanisms=MECHANISMS, stem=Frames, load=load,
            augment=heard, baselines=baselines, layers=2, width=64, heads=4, dropout=0.1, steps=500, batch=32,
            rate=4e-3)
