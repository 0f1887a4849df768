import torch
class KitsuneOptimizer(torch.optim.Optimizer): pass
