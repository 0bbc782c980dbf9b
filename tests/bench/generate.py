"""How much time 01b adds to the server's, and its memory: wall time over the ideal (n x delay / concurrency).

    python tests/bench/generate.py                      2 s, 2,000 tokens, 128 requests at a time; aim: 1.05
    python tests/bench/generate.py --delay 0.25
    python tests/bench/generate.py --n 200000 --delay 0 --tokens 20     aim: resident memory does not grow

A server in a process of its own answers after a fixed delay, with the real Kimi vocabulary. The wall time is that from
the first request's arrival to the end of 01b; startup_s is the time before, for Python and the tokenizer.
The last line is for scripts: ratio= wall_s= ideal_s=
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import repository

from tests.support.targets import KIMI, build_kimi, kimi_protocol

IN_FLIGHT = 128
TEXT = "The ocean is wide and deep, and its waves never rest; so we count them one by one. "
SAMPLE_EVERY_S = 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=3840, help="requests (default %(default)s)")
    parser.add_argument("--delay", type=float, default=2.0, help="seconds of a reply (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=2000, help="tokens of a reply (default %(default)s)")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve(Path(args.serve), args.delay, args.tokens))
    else:
        with tempfile.TemporaryDirectory() as folder:
            measure(args, Path(folder))


def measure(args, folder: Path) -> None:
    build_kimi(folder / "kimi")
    with open(folder / "questions.jsonl", "w") as file:
        for i in range(args.n):
            file.write(json.dumps({"messages": [{"role": "user", "content": f"Question {i}: {TEXT * 4}"}]}) + "\n")
    (folder / "config.toml").write_text("")
    flags = ["--delay", str(args.delay), "--tokens", str(args.tokens)]
    server = subprocess.Popen([sys.executable, __file__, "--serve", str(folder), *flags])
    try:
        while not (folder / "port").exists():
            time.sleep(0.05)
        run_client(args, folder)
    finally:
        server.terminate()
        server.wait()


def run_client(args, folder: Path) -> None:
    target = {"model": folder / "kimi", **KIMI}
    settings = {"dataset": folder / "questions.jsonl", "concurrency": IN_FLIGHT, "shuffle-seed": -1}
    settings |= {"base-urls": f"http://127.0.0.1:{(folder / 'port').read_text()}"}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in (target | settings).items()]
    command = [
        sys.executable,
        str(repository.ROOT / "01b_generate_synthetic.py"),
        f"--config={folder}/config.toml",
        *flags,
    ]
    started = time.time()
    client = subprocess.Popen([*command, f"--run-dir={folder}/run"], cwd=repository.ROOT)
    memory_mib, busy_s = [], 0.0
    while client.poll() is None:
        memory_mib.append(resident_mib(client.pid))
        busy_s = processor_s(client.pid) or busy_s
        time.sleep(SAMPLE_EVERY_S)
    ended = time.time()
    assert client.returncode == 0, client.returncode
    manifest = json.loads((folder / "run/01_synthetic/manifest.json").read_text())
    assert manifest["complete"] and manifest["counts"]["new"] == args.n, manifest["counts"]
    first = float((folder / "first").read_text())
    wall_s, ideal_s = ended - first, args.n * args.delay / IN_FLIGHT
    quarters = [max(memory_mib[i * len(memory_mib) // 4 :][: max(1, len(memory_mib) // 4)]) for i in range(4)]
    print(
        f"startup_s={first - started:.1f} samples_per_s={args.n / wall_s:.0f} cpu_ms_each={1000 * busy_s / args.n:.2f}"
    )
    print(f"resident_mib by quarter of the run: {' '.join(f'{mib:.0f}' for mib in quarters)}")
    print(f"ratio={wall_s / ideal_s if ideal_s else float('inf'):.3f} wall_s={wall_s:.1f} ideal_s={ideal_s:.1f}")


def resident_mib(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def processor_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def serve(folder: Path, delay_s: float, tokens: int) -> None:
    """Answer every chat completion with one reply of `tokens` tokens. Write the port and the time of the first request
    to files."""
    protocol = kimi_protocol(folder / "kimi")
    ids = (protocol.text_ids(TEXT * (tokens // 10)) * 2)[: tokens - 2]
    reasoning, content = ids[: len(ids) // 2], ids[len(ids) // 2 :]
    output_ids = [*reasoning, protocol.think_close, *content, protocol.end]
    message = {"role": "assistant", "reasoning": protocol.decode(reasoning), "content": protocol.decode(content)}
    choice = json.dumps({"index": 0, "message": message, "finish_reason": "stop", "token_ids": output_ids})
    first = folder / "first"

    async def connection(reader, writer):
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    (line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")), b":0"
                )
                sent = await reader.readexactly(int(length.split(b":")[1]))
                if sent:
                    if not first.exists():
                        first.write_text(str(time.time()))
                    answered = asyncio.get_running_loop().time() + delay_s
                    prompt_ids = protocol.prompt_ids(json.loads(sent)["messages"])
                    usage = {"prompt_tokens": len(prompt_ids), "completion_tokens": len(output_ids)}
                    body = f'{{"choices": [{choice}], "usage": {json.dumps(usage)}, "prompt_token_ids": {prompt_ids}}}'
                    await asyncio.sleep(answered - asyncio.get_running_loop().time())
                else:
                    body = '{"object": "list", "data": [{"id": "bench", "object": "model"}], "version": "bench"}'
                data = body.encode()
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(data)
                )
                writer.write(data)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(connection, "127.0.0.1", 0, backlog=1024)
    port = folder / "port.tmp"
    port.write_text(str(server.sockets[0].getsockname()[1]))
    port.rename(folder / "port")
    await server.serve_forever()


if __name__ == "__main__":
    main()
