# Whole models divided among processes, for distributed_worker.py: accelerate(group=) against the model of one process.
import copy
import importlib

import recurrent_models
import tiny_models
import torch
import torch.distributed as dist
import transformers
from torch import nn

import heed
from heed.transformers import _divided, accelerate

LENGTH = 160
LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
HYBRIDS = ("mamba2", "qwen3_next", "bamba", "jamba")


def world():
    return dist.group.WORLD


def build(name, **changes):
    if name in LLAMA_LIKE:
        return tiny_models.build(name, "eager", max_position_embeddings=2 * LENGTH, **changes)
    return recurrent_models.build(name, **changes)


def all_borders():
    """Parts of a multiple of 64 tokens less or more, and one that is shorter than a convolution."""
    ranks = dist.get_world_size()
    if ranks == 2:
        return [0, 96, LENGTH], [0, 23, LENGTH], [0, LENGTH - 2, LENGTH]
    return [[LENGTH * i // ranks for i in range(ranks)] + [LENGTH]]


def tokens():
    return recurrent_models.tokens(LENGTH)


def near(got, expected, what, tolerance=1e-5, least=0.0):
    assert got.shape == expected.shape and got.dtype == expected.dtype, (what, got.shape, expected.shape)
    apart = (got.detach() - expected.detach()).abs().max().item()
    assert apart <= tolerance * max(expected.detach().abs().max().item(), least), (what, apart)


def gradients(model):
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def run(model, **arguments):
    model.zero_grad()
    out = model(**arguments)
    out.loss.backward()
    return out.logits.detach(), out.loss.detach().clone(), gradients(model)


def part(x, borders, axis=1):
    begin, end = borders[dist.get_rank()], borders[dist.get_rank() + 1]
    return x.narrow(axis, begin, end - begin)


def expect_part(here, whole, borders, what, tolerance=1e-5):
    """Logits are those of one process; losses and gradients sum up to its own."""
    near(here[0], part(whole[0], borders), (what, "logits"), tolerance)
    dist.all_reduce(here[1])
    near(here[1], whole[1], (what, "loss"), tolerance)
    largest = max(x.abs().max().item() for x in whole[2].values())
    for name, x in here[2].items():
        dist.all_reduce(x)
        near(x, whole[2][name], (what, name), 2 * tolerance, least=0.01 * largest)


def labels_of(x):
    """Labels, some of which are ignored: two at the borders."""
    labels = x.clone()
    labels[0, 20:30] = labels[1, 96:100] = labels[1, 0] = -100
    return labels


def check_families():
    x = tokens()
    labels = labels_of(x)
    for name in (*LLAMA_LIKE, *HYBRIDS):
        model = build(name, **({"num_key_value_heads": 1} if name == "qwen3" else {}))  # keys are gathered
        model.train(name == "mamba2")
        with accelerate(model):
            whole = run(model, input_ids=x, labels=labels)
        before = recurrent_models.attributes(model)
        with accelerate(model, group=world()) as report:
            assert report.left == report.declined == [] and report.replaced
            assert not any(entry.by.endswith("_step") for entry in report.replaced)  # they have no group
            for borders in all_borders():
                own = {"input_ids": part(x, borders), "labels": part(labels, borders)}
                expect_part(run(model, **own), whole, borders, (name, borders))
            for other in recurrent_models.copies(model):
                assert recurrent_models.attributes(other) == before
        assert recurrent_models.attributes(model) == before
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        with accelerate(model, group=alone):
            one = run(model, input_ids=x, labels=labels)
        near(one[0], whole[0], (name, "one rank"))
        near(one[1], whole[1], (name, "one rank"))


def check_arguments():
    """Other arguments of a call, a model without its head, a DeviceMesh, checkpoints."""
    x, model = tokens(), build("llama")
    borders = all_borders()[-1 if dist.get_world_size() > 2 else 0]
    shifted = nn.functional.pad(labels_of(x)[:, 1:], (0, 1), value=-100)
    positions = torch.arange(LENGTH)[None] + 7
    embedded = model.get_input_embeddings()(x).detach()
    calls = [
        {"input_ids": x, "labels": x, "shift_labels": shifted},
        {"input_ids": x, "labels": x, "num_items_in_batch": 77, "position_ids": positions},
        {"input_ids": x, "labels": x, "attention_mask": torch.ones_like(x), "position_ids": positions.expand(2, -1)},
        {"inputs_embeds": embedded, "labels": x}, {"input_ids": x[:1], "labels": x[:1]},
    ]
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    divided = copy.deepcopy(model)
    accelerate(divided, group=mesh)
    for call in calls:
        own = {key: part(value, borders) if isinstance(value, torch.Tensor) else value for key, value in call.items()}
        expect_part(run(divided, **own), run(model, **call), borders, list(call))
    with torch.no_grad():
        hidden = model.model(x).last_hidden_state
        near(divided.model(part(x, borders)).last_hidden_state, part(hidden, borders), "a model without its head")
        exact = tiny_models.build("mistral", "sdpa", max_position_embeddings=2 * LENGTH).double()
        logits = exact(x).logits
        with accelerate(exact, group=world()):
            near(exact(part(x, borders)).logits, part(logits, borders), "float64", 1e-13)
    model.train(), divided.train()
    for one in (model, divided):
        one.gradient_checkpointing_enable({"use_reentrant": False})
    own = {"input_ids": part(x, borders), "labels": part(x, borders)}
    expect_part(run(divided, **own), run(model, input_ids=x, labels=x), borders, "checkpoints")


def expect_refusal(kind, text, function, *arguments, **options):
    try:
        function(*arguments, **options)
    except kind as refused:
        assert text in str(refused), (text, str(refused))
    else:
        raise AssertionError(f"{text}: nothing was refused")


class Smoothed(nn.Module):
    """A layer that adds the tokens before."""

    def forward(self, x):
        return x.cumsum(1)


def check_models_refused():
    """A model with a module that is not divided stays what it was, on all ranks."""
    unsupported, sizes = heed.Unsupported, {**tiny_models.DECODER, "max_position_embeddings": 64}
    classifier = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**sizes))
    dynamic = transformers.LlamaConfig(**sizes, rope_parameters={"rope_type": "dynamic", "factor": 2.0,
                                                                 "rope_theta": 10000.0})
    smoothed, on_one_rank = build("llama"), build("llama")
    smoothed.model.layers[1].mlp.act_fn = Smoothed()
    if dist.get_rank() == dist.get_world_size() - 1:
        on_one_rank.model.norm = Smoothed()
    refused = [
        (tiny_models.build("bert", "eager"), "BertForMaskedLM: is not divided among ranks: it is of the family 'bert'"),
        (recurrent_models.build("rwkv"), "RwkvForCausalLM"), (classifier, "LlamaForSequenceClassification"),
        (transformers.LlamaForCausalLM(dynamic), "LlamaRotaryEmbedding at model.rotary_emb"),
        (smoothed, "Smoothed at model.layers.1.mlp.act_fn"), (nn.Sequential(nn.Linear(2, 2)), "Sequential"),
    ]
    for model, text in refused:
        before = recurrent_models.attributes(model)
        expect_refusal(unsupported, text, accelerate, model, group=world())
        assert recurrent_models.attributes(model) == before, text
    before = recurrent_models.attributes(on_one_rank)
    expect_refusal((heed.InvalidArgument, unsupported), "Smoothed at model.norm", accelerate, on_one_rank,
                   group=world())
    assert recurrent_models.attributes(on_one_rank) == before
    expect_refusal(heed.InvalidArgument, "ProcessGroup", accelerate, build("llama"), group=3)


def check_calls_refused():
    x, borders = tokens(), all_borders()[0]
    model, rank, last = build("llama"), dist.get_rank(), dist.get_world_size() - 1
    accelerate(model, group=world())
    own, unsupported, bad = part(x, borders), heed.Unsupported, heed.InvalidArgument
    expect_refusal(unsupported, "already", accelerate, model, group=world())
    expect_refusal(unsupported, "generate", model.generate, own, max_new_tokens=2)
    expect_refusal(unsupported, "use_cache", model, own, use_cache=True)
    expect_refusal(unsupported, "past_key_values", model, own, past_key_values=transformers.DynamicCache())
    expect_refusal(unsupported, "output_attentions", model, own, output_attentions=True)
    padded = torch.ones_like(own)
    padded[0, 0] = 0
    expect_refusal(unsupported, "attention_mask", model, own, attention_mask=padded)
    packed = torch.arange(own.shape[1])[None].expand(2, -1).clone()
    if last > 0:
        text = f"position_ids of rank 1 begin at 0, expected {borders[1]}"
        expect_refusal(bad, text, model, own, position_ids=packed)
    packed[:, 5:] -= 5
    expect_refusal(unsupported, "restart", model, own, position_ids=packed)
    expect_refusal(bad, "labels has shape", model, own, labels=own[:, 1:])
    empty = own[:, :0] if rank == last else own
    expect_refusal(unsupported, f"rank {last} has no tokens", model, empty)
    if last > 0:
        expect_refusal(bad, f"rank {last}", model, own, labels=own if rank == last else None)
        expect_refusal((bad, unsupported), f"rank {last}" if rank != last else "attention_mask", model, own,
                       attention_mask=padded if rank == last else None)
    model.train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    dropped, again = model(own).logits, model(own).logits
    assert bool(torch.isfinite(dropped).all()) and not torch.equal(dropped, again), "dropout of attention"
    model.eval()
    experts = recurrent_models.build("qwen3_next")
    accelerate(experts, group=world())
    expect_refusal(unsupported, "output_router_logits", experts, own, output_router_logits=True)
    assert model(own).logits.shape[:2] == own.shape, "after refusals"


EVERY = {
    **tiny_models.DECODER, "head_dim": 8, "max_position_embeddings": 2 * LENGTH, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "sliding_window": 5, "attention_dropout": 0.0}
SPECIAL = {
    **{name: family.config for name, family in recurrent_models.FAMILIES.items()},
    "cohere2": tiny_models.FAMILIES["cohere2"].config, "deepseek_v3": tiny_models.FAMILIES["deepseek_v3"].config,
    "granitemoehybrid": recurrent_models.FAMILIES["granite_hybrid"].config,
    "gemma3": tiny_models.FAMILIES["gemma3"].config, "gpt_oss": tiny_models.FAMILIES["gpt_oss"].config,
    "lfm2_moe": {**EVERY, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "qwen3_5": {**EVERY, **recurrent_models.GDN}, "qwen3_5_moe": {**EVERY, **recurrent_models.GDN},
    "zamba2": {**recurrent_models.HYBRID, "num_key_value_heads": 4, "num_hidden_layers": 3, "mamba_d_state": 8,
               "mamba_ngroups": 2, "n_mamba_heads": 8, "mamba_headdim": 8, "chunk_size": 16, "num_mem_blocks": 1,
               "layers_block_type": ["mamba", "hybrid", "hybrid"], "hybrid_layer_ids": [1, 2], "adapter_rank": 4},
}


def check_every_family():
    """One model of each family that accelerate() divides, which takes longer."""
    x, borders = tokens(), all_borders()[0]
    for family in sorted(_divided._FAMILIES):
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        name = next(name for name, kind in vars(module).items()
                    if name.endswith("ForCausalLM") and kind.__module__ == module.__name__)
        config_class = getattr(transformers, name).config_class.__name__
        model = tiny_models.make(name, SPECIAL.get(family, EVERY), "eager", config_class)
        with accelerate(model):
            whole = run(model, input_ids=x, labels=x)
        with accelerate(model, group=world()):
            own = part(x, borders)
            expect_part(run(model, input_ids=own, labels=own), whole, borders, family, 1e-4)


def check():
    check_families()
    check_arguments()
    check_models_refused()
    check_calls_refused()
