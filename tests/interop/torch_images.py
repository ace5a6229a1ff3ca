"""DeiT and DiT, Pre-Norm and SiameseNorm, written down in PyTorch from their equations; records golden files.

Names are the references'. Only what the recorded files do not have is taken from here: distillation, other options.
"""

import json
import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) / math.sqrt(width // self.heads)).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(batch, length, width))


class Mlp(nn.Module):
    def __init__(self, width, hidden, approximate):
        super().__init__()
        self.fc1, self.fc2, self.approximate = nn.Linear(width, hidden), nn.Linear(hidden, width), approximate

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x), approximate=self.approximate))


def norm(width):
    return nn.LayerNorm(width, eps=1e-6)


class VitBlock(nn.Module):
    def __init__(self, width, heads, hidden, siamese):
        super().__init__()
        names = ("pre_norm", "post_norm", "input_norm") if siamese else ("norm",)
        for name in names:
            for number in (1, 2):
                setattr(self, f"{name}{number}", norm(width))
        self.attn, self.mlp = Attention(width, heads), Mlp(width, hidden, "none")

    def forward(self, streams, scale):
        for number, branch in ((1, self.attn), (2, self.mlp)):
            get = lambda name, number=number: getattr(self, f"{name}{number}")  # noqa: E731
            if len(streams) == 1:
                streams = (streams[0] + branch(get("norm")(streams[0])),)
                continue
            post, pre = streams
            post = get("post_norm")(post)
            update = branch(get("input_norm")(post + get("pre_norm")(pre)))
            streams = post + scale * update, pre + update
        return streams


class TorchViT(nn.Module):
    """timm's ViT with DeiT's distillation, in training mode: the logits of every head."""

    def __init__(self, config, siamese):
        super().__init__()
        width, side = config["embed_dim"], config["patch_size"]
        extra = 1 + config["distilled"]
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(config["in_chans"], width, side, side)})
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        if config["distilled"]:
            self.dist_token = nn.Parameter(torch.zeros(1, 1, width))
            self.head_dist = nn.Linear(width, config["num_classes"])
        self.pos_embed = nn.Parameter(torch.zeros(1, extra + (config["img_size"] // side) ** 2, width))
        hidden = int(width * config["mlp_ratio"])
        self.blocks = nn.ModuleList(
            VitBlock(width, config["num_heads"], hidden, siamese) for _ in range(config["depth"])
        )
        for name in ("pre_norm", "post_norm", "final_norm") if siamese else ("norm",):
            setattr(self, name, norm(width))
        self.head, self.siamese, self.distilled = (
            nn.Linear(width, config["num_classes"]),
            siamese,
            config["distilled"],
        )

    def forward(self, images, states):
        x = self.patch_embed["proj"](images).flatten(2).transpose(1, 2)
        tokens = [self.cls_token, *([self.dist_token] if self.distilled else [])]
        x = torch.cat([*(token.expand(len(x), -1, -1) for token in tokens), x], dim=1) + self.pos_embed
        streams = (x, x) if self.siamese else (x,)
        states.append(streams)
        for i, block in enumerate(self.blocks):
            streams = block(streams, (2 * (i + 1)) ** -0.5)
            states.append(streams)
        if self.siamese:  # the names of the last two are swapped there
            x = self.final_norm(self.pre_norm(streams[0]) + self.post_norm(streams[1]))
        else:
            x = self.norm(streams[0])
        return [self.head(x[:, 0]), *([self.head_dist(x[:, 1])] if self.distilled else [])]


class DitBlock(nn.Module):
    def __init__(self, width, heads, hidden, siamese):
        super().__init__()
        if siamese:
            for number in (1, 2):
                setattr(self, f"prenorm{number}", norm(width))
                setattr(self, f"postnorm{number}", norm(width))
        self.attn, self.mlp = Attention(width, heads), Mlp(width, hidden, "tanh")
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, streams, c, scale):
        parts = self.adaLN_modulation(c).chunk(6, dim=1)
        for number, branch in ((1, self.attn), (2, self.mlp)):
            shift, factor, gate = (part.unsqueeze(1) for part in parts[3 * number - 3 : 3 * number])
            get = lambda name, number=number: getattr(self, f"{name}{number}")  # noqa: E731
            post = get("postnorm")(streams[0]) if len(streams) == 2 else streams[0]
            read = post + get("prenorm")(streams[1]) if len(streams) == 2 else post
            update = gate * branch(plain(read) * (1 + factor) + shift)
            streams = (post + scale * update, streams[1] + update) if len(streams) == 2 else (post + update,)
        return streams


def plain(x):
    return F.layer_norm(x, x.shape[-1:], eps=1e-6)


class TorchDiT(nn.Module):
    """DiT with the time features given."""

    def __init__(self, config, siamese):
        super().__init__()
        width, side, self.config, self.siamese = config["hidden_size"], config["patch_size"], config, siamese
        self.x_embedder = nn.ModuleDict({"proj": nn.Conv2d(config["in_channels"], width, side, side)})
        self.t_embedder = nn.ModuleDict(
            {"mlp": nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))}
        )
        rows = config["num_classes"] + (config["class_dropout_prob"] > 0)
        self.y_embedder = nn.ModuleDict({"embedding_table": nn.Embedding(rows, width)})
        hidden = int(width * config["mlp_ratio"])
        self.blocks = nn.ModuleList(
            DitBlock(width, config["num_heads"], hidden, siamese) for _ in range(config["depth"])
        )
        if siamese:
            self.prenorm, self.postnorm = norm(width), norm(width)
        self.out = config["in_channels"] * (2 if config["learn_sigma"] else 1)
        self.final_layer = nn.ModuleDict({
            "linear": nn.Linear(width, side**2 * self.out),
            "adaLN_modulation": nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width)),
        })  # fmt: skip

    def forward(self, x, features, y, table, states):
        side = self.config["patch_size"]
        h = self.x_embedder["proj"](x).flatten(2).transpose(1, 2) + table
        c = self.t_embedder["mlp"](features) + self.y_embedder["embedding_table"](y)
        streams = (h, h) if self.siamese else (h,)
        states.append(streams)
        for i, block in enumerate(self.blocks):
            streams = block(streams, c, (2 * (i + 1)) ** -0.5)
            states.append(streams)
        h = self.postnorm(streams[0]) + self.prenorm(streams[1]) if self.siamese else streams[0]
        shift, factor = (part.unsqueeze(1) for part in self.final_layer["adaLN_modulation"](c).chunk(2, dim=1))
        h = self.final_layer["linear"](plain(h) * (1 + factor) + shift)
        rows = round(h.shape[1] ** 0.5)
        h = torch.einsum("nhwpqc->nchpwq", h.reshape(len(h), rows, rows, side, side, self.out))
        return h.reshape(len(h), self.out, rows * side, rows * side)


def position_table(rows, width):
    """[1, rows^2, width], by loops: the column in the first half, the row in the second, sines before cosines."""
    table = np.zeros((rows * rows, width), np.float64)
    for place in range(rows * rows):
        for half, number in enumerate((place % rows, place // rows)):
            for i in range(width // 4):
                angle = number / 10_000 ** (i / (width // 4))
                table[place, half * width // 2 + i] = math.sin(angle)
                table[place, half * width // 2 + width // 4 + i] = math.cos(angle)
    return table[None].astype(np.float32)


def randomise(model, seed):
    """Weights that all differ from a start, float32; returned as arrays, loaded as float64."""
    random = np.random.default_rng(seed)
    weights = {
        name: random.normal(0.8 if "norm" in name and name.endswith("weight") else 0.0, 0.2, weight.shape)
        for name, weight in model.state_dict().items()
    }
    weights = {name: weight.astype(np.float32) for name, weight in weights.items()}
    model.load_state_dict({name: torch.from_numpy(weight) for name, weight in weights.items()})
    return model.double(), weights


def save(path, config, weights, arrays, states, model, loss):
    loss.backward()
    arrays["out/loss"] = loss.detach()
    for i, streams in enumerate(states):
        arrays |= {f"state/{name}_{i}": stream for name, stream in zip("xy", streams, strict=False)}
    arrays |= {f"grad/{name}": parameter.grad for name, parameter in model.named_parameters()}
    arrays = {name: array.detach().numpy() for name, array in arrays.items()}
    arrays |= {f"param/{name}": weight for name, weight in weights.items()}
    meta = {"case": path.stem, "dtype": "float64", "torch": torch.__version__}
    np.savez(path, meta=json.dumps(meta), config=json.dumps(config), **arrays)


def record_vit(path, config, siamese, head_weights=(0.5, 0.5), seed=0):
    """Writes outputs, streams and gradients of a ViT in float64; a distilled one's loss weighs its heads so."""
    model, weights = randomise(TorchViT(config, siamese), seed)
    generator, states = torch.Generator().manual_seed(seed), []
    shape = 3, config["in_chans"], config["img_size"], config["img_size"]
    images = torch.randn(shape, generator=generator, dtype=torch.float64)
    labels = torch.randint(config["num_classes"], (2, 3), generator=generator)
    heads = model(images, states)
    losses = [F.cross_entropy(logits, own) for logits, own in zip(heads, labels, strict=False)]
    loss = sum(w * own for w, own in zip(head_weights, losses, strict=True)) if len(heads) == 2 else losses[0]
    arrays = {"in/image": images, "in/labels": labels[0], "in/labels_dist": labels[1], "out/logits": heads[0]}
    if len(heads) == 2:
        arrays["out/logits_dist"] = heads[1]
    arrays["out/logits_eval"] = sum(heads) / len(heads)
    save(path, config, weights, arrays, states, model, loss)


def record_dit(path, config, siamese, seed=0):
    """Writes outputs, streams and gradients of a DiT in float64."""
    model, weights = randomise(TorchDiT(config, siamese), seed)
    generator, states = torch.Generator().manual_seed(seed), []
    size, rows = config["input_size"], config["input_size"] // config["patch_size"]
    x = torch.randn((3, config["in_channels"], size, size), generator=generator, dtype=torch.float64)
    target = torch.randn((3, model.out, size, size), generator=generator, dtype=torch.float64)
    t = torch.tensor([0, 41, 999])
    y = torch.tensor([0, 2, config["num_classes"] - (config["class_dropout_prob"] == 0)])
    angles = t[:, None].float() * torch.exp(-math.log(10_000) * torch.arange(128, dtype=torch.float32) / 128)
    features = torch.cat([angles.cos(), angles.sin()], dim=1).double()
    table = position_table(rows, config["hidden_size"])
    output = model(x, features, y, torch.from_numpy(table).double(), states)
    arrays = {"in/x": x, "in/t": t, "in/y": y, "in/target": target, "out/output": output, "out/t_freq": features}
    save(path, config, weights | {"pos_embed": table}, arrays, states, model, F.mse_loss(output, target))
