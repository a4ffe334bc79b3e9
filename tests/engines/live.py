"""One vLLM engine that serves while its weights change, driven by lines on stdin: live.py REPORT OPTIONS.

OPTIONS is JSON for vllm.AsyncEngineArgs. The engine appends its reports to the file REPORT, a line of JSON each.

    start              constructs the engine
    tokens             24 greedy tokens for each of 6 prompts, one prompt at a time
    load               starts 4 clients, each with a request of 24 tokens after the other
    rest               ends the clients and reports the lowest and highest token of each answer, and the times between tokens
    update N MODE      changes to version N: prepares, pauses in vLLM's MODE (wait or keep), switches, resumes
    stream N [late]    an update to version N during a request of 400 tokens, in mode keep: reports the times between tokens
                       N may be a file instead, with the update of vLLM's engine `ipc`; late: prepares in the pause
    floor              the seconds of the driver's calls alone that replace pieces like those of the weights
    sleep LEVEL
    wake
    quit
"""
import asyncio
import json
import pathlib
import sys
import time

PROMPTS = [[1] + [(7 * i + 13 * j) % 31990 + 5 for j in range(9 + i)] for i in range(6)]
CLIENTS = 4


class Driver:
    def __init__(self, path, options):
        self.path, self.options = path, options
        self.engine = None
        self.count = 0
        self.clients, self.answers, self.gaps = [], [], []

    def report(self, **values):
        with open(self.path, "a") as file:
            file.write(json.dumps({"at": time.monotonic()} | values) + "\n")

    async def generate(self, prompt, count):
        """Returns the tokens of a request and the time of each."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self.count += 1
        sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA)
        tokens, times = [], []
        async for output in self.engine.generate({"prompt_token_ids": prompt}, sampling, str(self.count)):
            tokens += output.outputs[0].token_ids
            times += [time.monotonic()] * len(output.outputs[0].token_ids)
        return list(tokens), times

    async def client(self, number):
        from vllm.exceptions import RetryableRequestError

        while True:
            try:
                tokens, times = await self.generate(PROMPTS[number % len(PROMPTS)], 24)
            except RetryableRequestError:  # The engine is paused.
                await asyncio.sleep(0.002)
                continue
            self.answers.append([len(tokens), min(tokens), max(tokens)])
            self.gaps += [after - before for before, after in zip(times, times[1:])]
            number += CLIENTS

    async def start(self):
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**self.options))
        await self.generate(PROMPTS[0], 1)
        return {}

    async def tokens(self):
        return {"tokens": [(await self.generate(prompt, 24))[0] for prompt in PROMPTS]}

    async def load(self):
        self.answers, self.gaps = [], []
        self.clients = [asyncio.create_task(self.client(number)) for number in range(CLIENTS)]
        return {}

    async def rest(self):
        for client in self.clients:
            client.cancel()
        ended = await asyncio.gather(*self.clients, return_exceptions=True)
        failed = [repr(error) for error in ended if not isinstance(error, asyncio.CancelledError)]
        gaps = sorted(self.gaps)
        return {"answers": self.answers, "failed": failed, "median_gap": gaps[len(gaps) // 2], "longest_gap": gaps[-1]}

    async def update(self, version, mode, late=None):
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        info = {"version": int(version)} if version.isdigit() else json.loads(pathlib.Path(version).read_text())
        took = {}

        async def timed(name, call):
            begin = time.monotonic()
            await call
            took[name] = took.get(name, 0) + time.monotonic() - begin

        async def prepare():
            await timed("prepare", self.engine.start_weight_update())
            await timed("prepare", self.engine.update_weights(WeightTransferUpdateRequest(update_info=info)))

        # Ours prepares while the engine serves. vLLM's engine `ipc` writes to the weights.
        early = "version" in info and not late
        if early:
            await prepare()
        await timed("pause", self.engine.pause_generation(mode=mode, clear_cache=mode != "keep"))
        try:
            if not early:
                await prepare()
            await timed("finish", self.engine.finish_weight_update())
        finally:
            await self.engine.resume_generation()
        return took

    async def stream(self, version, late=None):
        running = asyncio.create_task(self.generate(PROMPTS[0], 400))
        await asyncio.sleep(0.3)
        begin = time.monotonic()
        result = await self.update(version, "keep", late)
        end = time.monotonic()
        _, times = await running
        gaps = [(after - before, before) for before, after in zip(times, times[1:])]
        ordered = sorted(gap for gap, _ in gaps)
        during = max((gap for gap, at in gaps if at <= end and at + gap >= begin), default=0)
        return result | {"median_gap": ordered[len(ordered) // 2], "gap_of_update": during, "seconds": end - begin}

    async def floor(self):
        return (await self.engine.collective_rpc("driver_floor"))[0]

    async def sleep(self, level):
        await self.engine.sleep(int(level))
        return {}

    async def wake(self):
        await self.engine.wake_up()
        return {}

    async def run(self):
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            command, *arguments = line.split()
            if command == "quit":
                break
            begin = time.monotonic()
            try:
                result = await getattr(self, command)(*arguments)
            except Exception as error:  # noqa: BLE001 - the row decides
                import traceback

                traceback.print_exc()
                result = {"error": f"{type(error).__name__}: {error}"}
            self.report(event=command, **{"seconds": time.monotonic() - begin} | result)
        self.report(event="quit")


def main():
    begin = time.monotonic()
    driver = Driver(sys.argv[1], json.loads(sys.argv[2]))
    import torch  # noqa: F401
    import vllm  # noqa: F401
    driver.report(event="imported", seconds=time.monotonic() - begin)
    asyncio.run(driver.run())


if __name__ == "__main__":
    main()
