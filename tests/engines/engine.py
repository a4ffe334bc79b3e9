"""One vLLM engine in its default process model, driven by lines on stdin: engine.py REPORT OPTIONS.

OPTIONS is JSON for vllm.LLM. The engine appends its reports to the file REPORT, a line of JSON each.

    start          constructs the engine
    tokens N       N greedy tokens for each of 20 prompts: a prompt at a time, whose tokens are reproducible, then all together
    decode N       one request of N tokens
    quit
"""
import json
import os
import sys
import time

PROMPTS = [[1] + [(7 * i + 13 * j) % 31990 + 5 for j in range(9 + i)] for i in range(20)]


def main():
    path, options = sys.argv[1], json.loads(sys.argv[2])

    def report(**values):
        line = json.dumps({"at": time.monotonic()} | values) + "\n"
        with open(path, "a") as file:
            file.write(line)

    begin = time.monotonic()
    import torch
    from vllm import LLM, SamplingParams
    report(event="imported", seconds=time.monotonic() - begin)
    llm = None

    def generate(prompts, count):
        sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], sampling, use_tqdm=False)
        return [list(each.outputs[0].token_ids) for each in outputs]

    for line in sys.stdin:
        command, *arguments = line.split()
        begin = time.monotonic()
        if command == "start":
            initialised = torch.cuda.is_initialized()
            llm = LLM(**options)
            built = time.monotonic()
            generate(PROMPTS[:1], 1)
            report(event="start", seconds=built - begin, first_token=time.monotonic() - built, cuda_in_front_end=initialised,
                   method=os.environ.get("VLLM_WORKER_MULTIPROC_METHOD", "fork"),
                   kv_blocks=llm.llm_engine.vllm_config.cache_config.num_gpu_blocks)
        elif command == "tokens":
            count = int(arguments[0])
            alone = [generate([prompt], count)[0] for prompt in PROMPTS]
            report(event="tokens", seconds=time.monotonic() - begin, tokens=alone, together=generate(PROMPTS, count))
        elif command == "decode":
            tokens = generate(PROMPTS[:1], int(arguments[0]))
            report(event="decode", seconds=time.monotonic() - begin, tokens=tokens)
        elif command == "quit":
            break
    report(event="quit")


if __name__ == "__main__":
    main()
