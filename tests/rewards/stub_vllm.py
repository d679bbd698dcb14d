"""A program `vllm` for tests: `vllm serve MODEL --port N ...` answers as a judge does, after a moment.

Variables of the environment say what it does: VLLM_STUB_NOTES, a file to which it writes its arguments, process and the
process of a worker that it starts, as real ones do; VLLM_STUB_FAILS, to end with an error before it answers;
VLLM_STUB_SAYS, the judge's words.
"""

import json
import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ARGUMENTS = sys.argv[1:]
MODEL = ARGUMENTS[1]


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.answer({"data": [{"id": MODEL}]} if self.path == "/v1/models" else {})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.answer({"choices": [{"message": {"content": os.environ.get("VLLM_STUB_SAYS", "<Score>3</Score>")}}]})

    def answer(self, value: dict) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Nothing."""


def main() -> None:
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    note = {"arguments": ARGUMENTS, "pid": os.getpid(), "worker": worker.pid}
    notes = Path(os.environ["VLLM_STUB_NOTES"])
    with notes.open("a") as stream:
        stream.write(json.dumps(note) + "\n")
    print("loading the model", flush=True)
    time.sleep(0.2)
    if os.environ.get("VLLM_STUB_FAILS"):
        print("torch.OutOfMemoryError: CUDA out of memory", file=sys.stderr, flush=True)
        sys.exit(3)
    port = int(ARGUMENTS[ARGUMENTS.index("--port") + 1])
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
