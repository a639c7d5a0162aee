"""Three threads, each with a stream of its own, take turns; one of them runs a backward pass."""

import threading

import torch

SIZE, ROUNDS = 3072, 12
turn = threading.Lock()  # kernels that run side by side take longer, by chance


def work(seed: int, results: dict[int, float]) -> None:
    generator = torch.Generator("cuda").manual_seed(seed)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        a = torch.randn(SIZE, SIZE, device="cuda", generator=generator)
        a = a.to(torch.bfloat16).requires_grad_(seed == 0)
        for _ in range(ROUNDS):
            with turn:
                out = torch.softmax(a @ a.T, dim=-1)
                if a.requires_grad:
                    out.square().mean().backward()
                stream.synchronize()
        results[seed] = out.float().sum().item()


results: dict[int, float] = {}
threads = [threading.Thread(target=work, args=(seed, results)) for seed in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(f"sums {[round(results[seed]) for seed in range(3)]}")
