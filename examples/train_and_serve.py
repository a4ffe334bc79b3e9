"""Trains and serves on one GPU: vLLM answers from each version that a trainer in another process puts, at the same addresses.

    train_and_serve.py MODEL BROKER    needs a GPU, vLLM, and a broker: `vmmfd serve --socket BROKER`

The trainer only scales one weight: put your own step there.
"""

import asyncio
import multiprocessing
import sys
from typing import Any


def train(socket: str, versions: Any, rounds: Any) -> None:
    """The trainer's process: puts a version each time it is asked."""
    import torch
    import vmmfd
    import vmmfd.engines.vllm

    broker = vmmfd.connect(socket)
    name = f"policy/{vmmfd.device_uuid(0)}"
    while rounds.get():
        # A copy of the newest version, on the same GPU, in the layout of the engine's model.
        with vmmfd.engines.vllm.next_version(broker, name) as version:
            with torch.no_grad():
                version.tensors["model.layers.0.mlp.down_proj.weight"].mul_(1.01)
            versions.put(version.put().version)


async def serve(model: str, socket: str, versions: Any, rounds: Any) -> None:
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
    from vllm.v1.engine.async_llm import AsyncLLM

    options = AsyncEngineArgs(
        model=model,
        load_format="vmmfd",
        model_loader_extra_config={"broker": socket, "name": "policy"},
        weight_transfer_config={"backend": "vmmfd"},
        gpu_memory_utilization=0.5,  # The rest is the trainer's.
    )
    engine = AsyncLLM.from_engine_args(options)
    for number in range(3):
        async for output in engine.generate("The capital of France is", SamplingParams(max_tokens=16), str(number)):
            if output.finished:
                print(output.outputs[0].text)
        rounds.put(True)
        version = await asyncio.to_thread(versions.get)
        await engine.start_weight_update()
        # The engine serves the old version meanwhile.
        await engine.update_weights(WeightTransferUpdateRequest(update_info={"version": version}))
        await engine.pause_generation(mode="wait")
        try:
            await engine.finish_weight_update()
        finally:
            await engine.resume_generation()
    rounds.put(False)
    engine.shutdown()


if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    model, socket = sys.argv[1:]
    versions: Any = spawn.Queue()
    rounds: Any = spawn.Queue()
    trainer = spawn.Process(target=train, args=(socket, versions, rounds))
    trainer.start()
    asyncio.run(serve(model, socket, versions, rounds))
    trainer.join()
