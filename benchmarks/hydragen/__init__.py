"""The experiments of the Hydragen paper, and FlashInfer's parallel generation, on one GPU: ours, Hydragen's way, baselines."""
