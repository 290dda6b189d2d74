"""A prefix file with random KV, which tests read, change and write again."""

from __future__ import annotations

import json

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from prefixkit.kv.prefixes.file import open_prefixes
from prefixkit.kv.prefixes.front_coding import front_coded
from prefixkit.kv.prefixes.write import Origin, arrays_of, checksum_of, write_prefixes
from prefixkit.testing.kv_specs import spec_of_alike

SPEC = spec_of_alike(num_layers=3, kv_heads=2, head_dim=4)
VOCAB, MODEL = 1000, Origin("fingerprint of a model")


class Saved:
    """Prefixes of 70, 170 and 80 tokens, of which 60 and 130 are shared, with random KV, in a file."""

    def __init__(self, folder, spec=SPEC):
        rng = np.random.default_rng(0)
        first = rng.integers(0, VOCAB - 1, 170).astype(np.int32)
        second = np.concatenate([first[:60], np.array([VOCAB - 1], np.int32), first[:19]])
        self.spec, self.path = spec, folder / "prefixes.safetensors"
        self.prefixes, _ = front_coded([first, second, first[:130]])
        self.all = torch.randn(190, spec.size).to(spec.dtype)
        self.asked = []
        self.write()

    def kv(self, begin, end):
        self.asked.append((begin, end))
        return self.all[begin:end]

    def write(self, **changes):
        given = {"prefixes": self.prefixes, "kv": self.kv, "spec": self.spec, "origin": MODEL, **changes}
        write_prefixes(self.path, **given)

    def open(self, **changes):
        given = {"spec": self.spec, "origin": MODEL, "vocab_size": VOCAB, **changes}
        return open_prefixes(self.path, **given)

    def read_all(self):
        return self.open().read(0, 190)

    def header(self):
        content = self.path.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        return end, json.loads(content[8:end])

    def place(self, name):
        """Where in the file a tensor's bytes begin and end."""
        end, header = self.header()
        return tuple(end + at for at in header[name]["data_offsets"])

    def flip(self, at):
        with self.path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1]))

    def rewrite(self, metadata=None, **tensors):
        """The file made by hand: some of its parts are others, all checksums are right."""
        held = load_file(self.path) | tensors
        with safe_open(self.path, "pt") as file:
            facts = file.metadata() | (metadata or {})
        arrays = [held[name].numpy() for name in arrays_of(facts) if name in held]
        save_file(held, self.path, facts | {"checksum": checksum_of(facts, arrays)})
