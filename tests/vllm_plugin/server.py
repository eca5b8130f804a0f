"""vLLM's own HTTP server as a process, and requests to it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Loaded machines need long to import vLLM three times.
START_SECONDS = 300
_EXTENSION = "moegraft.hosts.vllm.counters.WorkerExtension"


@dataclass(frozen=True)
class Answer:
    """A status and the JSON of an answer (its text where it is none)."""

    status: int
    body: Any

    @property
    def message(self) -> str:
        """The message of an error."""
        return str(self.body["error"]["message"])


@dataclass(frozen=True)
class Server:
    """A server that runs.

    Attributes:
        port: on 127.0.0.1.
        log: what it writes.
    """

    port: int
    log: Path
    process: subprocess.Popen[bytes]

    def post(self, path: str, **body: Any) -> Answer:
        """Ask; errors of the connection are status 0."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return Answer(answer.status, _parsed(answer.read()))
        except urllib.error.HTTPError as error:
            return Answer(error.code, _parsed(error.read()))
        except OSError as error:
            return Answer(0, str(error))

    def load(self, name: str, folder: Path, **options: Any) -> Answer:
        """Load an adapter."""
        path = "/v1/load_lora_adapter"
        return self.post(path, lora_name=name, lora_path=str(folder), **options)

    def unload(self, name: str) -> Answer:
        """Unload an adapter."""
        return self.post("/v1/unload_lora_adapter", lora_name=name)

    def complete(self, model: str, prompt: list[int], tokens: int) -> Answer:
        """Write greedily; the body of a good answer is the list of tokens."""
        answer = self.post(
            "/v1/completions",
            model=model,
            prompt=prompt,
            max_tokens=tokens,
            temperature=0,
            return_token_ids=True,
            ignore_eos=True,
        )
        if answer.status != 200:
            return answer
        return Answer(200, answer.body["choices"][0]["token_ids"])

    def counters(self) -> list[dict[str, int]]:
        """What the plugin counted, per worker."""
        found: list[dict[str, int]] = self.workers("moegraft_counters")
        return found

    def workers(self, method: str, **options: Any) -> Any:
        """Call a method of each worker."""
        answer = self.post("/collective_rpc", method=method, **options)
        assert answer.status == 200, answer
        return answer.body["results"]

    def is_up(self) -> bool:
        """True while it answers that it is well."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                return True
        except OSError:
            return False


@contextmanager
def running_server(
    model: Path,
    log: Path,
    *options: str,
    env: Mapping[str, str] | None = None,
    extension: bool = True,
) -> Iterator[Server]:
    """Start a server for a model with LoRA, wait until it is up, and stop it at the end."""
    port = _free_port()
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--served-model-name", "base", "--skip-tokenizer-init", "--dtype", "float32"),
        *("--max-model-len", "128", "--max-num-seqs", "16", "--port", str(port)),
        *("--host", "127.0.0.1", "--enable-lora", "--max-loras", "3", "--max-lora-rank", "16"),
        *("--max-cpu-loras", "16", *options),
        *(("--worker-extension-cls", _EXTENSION) if extension else ()),
    ]
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # for /collective_rpc
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **(env or {}),
    }
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **settings},
            start_new_session=True,
        )
    server = Server(port, log, process)
    try:
        _wait(server)
        yield server
    finally:
        _stop(process)


def _wait(server: Server) -> None:
    for _ in range(START_SECONDS):
        if server.is_up():
            return
        assert server.process.poll() is None, f"the server ended:\n{_end(server.log)}"
        time.sleep(1)
    raise AssertionError(f"the server is not up after {START_SECONDS} s:\n{_end(server.log)}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and the processes that it started: they are a session of their own."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def _end(log: Path) -> str:
    return log.read_text(errors="replace")[-6000:]


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode(errors="replace")
