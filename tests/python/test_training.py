"""Training with fsdp_cpp is training with torch's FSDP2, to the last bit."""

import contextlib
import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from parity import ENGINES, Mlp, batch, compare, mesh_of, needs_torch_2_13, see_grads, sharded_mlps, train, whole
from pool import DEVICE
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts


def reshards(reshard):
    # What neighbours keep is padded in another way.
    compare(functools.partial(sharded_mlps, reshard_after_forward=reshard), sizes=reshard != 2)


@pytest.mark.parametrize("reshard", [True, False, None])
@pytest.mark.parametrize("size", [2, 4])
def test_reshard_after_forward(ranks, size, reshard):
    ranks(size).run(reshards, reshard)


def many_ranks(shape):
    # A fake sum has one rank's part only, and its average is no average.
    compare(lambda engine: sharded_mlps(engine, mesh=mesh_of(*shape)), values=False)


@pytest.mark.parametrize("shape", [(64,), (8, 8)])
def test_many_ranks_of_which_one_runs(ranks, shape):
    ranks(64, True).run(many_ranks, shape)


def test_reshard_to_fewer_ranks(ranks):
    ranks(4).run(reshards, 2)


def replicas(how):
    def make(engine):
        if how == "hsdp":
            return sharded_mlps(engine, mesh=mesh_of(2, 2))
        model = nn.Sequential(*[Mlp() for _ in range(3)])
        mesh = mesh_of()
        for layer in model:
            engine.replicate(layer, mesh=mesh)
        return engine.replicate(model, mesh=mesh)

    compare(make)


@pytest.mark.parametrize("how", ["hsdp", "replicate"])
def test_replicas(ranks, how):
    ranks(4).run(replicas, how)


def accumulation(shape, how):
    def run(engine, model, seen):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            for micro in range(3):
                is_last = micro == 2
                if how == "no_sync":
                    model.set_requires_gradient_sync(is_last)
                elif how == "no_all_reduce":
                    model.set_requires_all_reduce(is_last)
                    model.set_reshard_after_backward(is_last)
                else:
                    model.set_is_last_backward(is_last)
                    model.set_reshard_after_backward(is_last)
                loss = model(batch(3 * step + micro)).square().mean()
                loss.backward()
            see_grads(model, seen, loss)
            optimizer.step()
            optimizer.zero_grad()

    # With keep_whole, torch prefetches gathers of modules whose parameters it frees unused.
    compare(
        lambda engine: sharded_mlps(engine, mesh=mesh_of(*shape), reshard_after_forward=how != "no_all_reduce"),
        run,
        collectives=how != "keep_whole",
    )


@pytest.mark.parametrize("how", ["no_sync", "keep_whole"])
def test_accumulation(ranks, how):
    ranks(2).run(accumulation, (), how)


@pytest.mark.parametrize("how", ["no_sync", "no_all_reduce"])
def test_accumulation_with_replicas(ranks, how):
    ranks(4).run(accumulation, (2, 2), how)


def prefetch(how):
    def run(engine, model, seen):
        layers = list(model)
        if how == "explicit":
            for layer, after in zip(layers, layers[1:]):
                layer.set_modules_to_forward_prefetch([after])
                after.set_modules_to_backward_prefetch([layer])
        elif how == "async unshard":
            handle = layers[0].unshard(async_op=True)
            handle.wait()
            handle.wait()
            assert not isinstance(layers[0].up.weight, DTensor)
            assert layers[1].unshard() is None
        train(engine, model, seen)

    compare(sharded_mlps, run)


@pytest.mark.parametrize("how", ["explicit", "async unshard"])
def test_prefetch(ranks, how):
    ranks(2).run(prefetch, how)


def forward_methods():
    class Model(Mlp):
        def encode(self, x, *, scale):
            return torch.relu(self.up(x)) * scale

        def both(self, x):
            return self(x) + self.down(self.encode(x, scale=2.0))

    def make(engine):
        model = engine.fully_shard(Model(), mesh=mesh_of())
        engine.register_fsdp_forward_method(model, "encode")
        engine.register_fsdp_forward_method(model, "both")
        engine.register_fsdp_forward_method(nn.Linear(1, 1), "nothing")
        with pytest.raises(ValueError, match="does not have a method missing"):
            engine.register_fsdp_forward_method(model, "missing")
        return model

    def run(engine, model, seen):
        model(batch(9))  # so that this forward is the root's first one
        for step in range(2):
            loss = model.encode(batch(step), scale=0.5).square().mean()
            loss.backward()
            see_grads(model, seen, loss)
            loss = model.both(batch(step)).square().mean()
            loss.backward()
            see_grads(model, seen, loss)

    compare(make, run, collectives=False)  # `both` gathers once, and torch's three times


def test_forward_methods(ranks):
    ranks(2).run(forward_methods)


def divide_factors():
    def run(engine, model, seen):
        for factor, layer in zip((0.5, 3.0, 4.0), model):
            layer.set_gradient_divide_factor(factor)
            layer.set_force_sum_reduction_for_comms(True)  # gloo has no weighted sums
        train(engine, model, seen)

    compare(sharded_mlps, run)


def test_divide_factors(ranks):
    ranks(2).run(divide_factors)


def all_reduce_hook(on_stream):
    def run(engine, model, seen):
        def hook(flat):
            seen.append(("hook", flat.clone()))
            flat.mul_(2)

        stream = torch.get_device_module(DEVICE).Stream() if on_stream else None
        model[1].set_all_reduce_hook(hook, stream=stream)
        train(engine, model, seen)
        if not on_stream:  # torch's engine refuses a stream without a hook
            model[1].set_all_reduce_hook(None)
            train(engine, model, seen)

    compare(sharded_mlps, run)


@pytest.mark.parametrize("on_stream", [False, True])
def test_all_reduce_hook(ranks, on_stream):
    ranks(2).run(all_reduce_hook, on_stream)


class Gather:
    def __init__(self, seen):
        self.seen = seen

    def allocate(self, size, *, dtype, device):
        self.seen.append(("allocate", list(size)))
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.seen.append(("gather", input_tensor.clone()))
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class Scatter(Gather):
    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self.seen.append(("scatter", input_tensor.clone()))
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def custom_collectives():
    def run(engine, model, seen):
        gathers, scatters = [], []
        model[0].set_custom_all_gather(Gather(gathers))
        model[1].set_custom_reduce_scatter(Scatter(scatters))
        train(engine, model, seen)
        assert gathers and scatters
        seen += [(name, value) for name, value in gathers + scatters if name != "allocate"]

    compare(sharded_mlps, run)


def test_custom_collectives(ranks):
    ranks(2).run(custom_collectives)


def memory_of_the_process_group():
    def run(engine, model, seen):
        for layer in (model, *model):
            layer.set_allocate_memory_from_process_group_for_comm(True)
        train(engine, model, seen)
        model[0].set_custom_all_gather(Gather([]))
        with pytest.raises(AssertionError):
            model[0].set_allocate_memory_from_process_group_for_comm(True)

    compare(sharded_mlps, run)


def test_memory_of_the_process_group(ranks):
    ranks(2).run(memory_of_the_process_group)


def post_optim_event():
    def run(engine, model, seen):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            loss = model(batch(step)).square().mean()
            loss.backward()
            see_grads(model, seen, loss)
            optimizer.step()
            optimizer.zero_grad()
            model.set_post_optim_event(torch.cuda.current_stream().record_event())

    compare(sharded_mlps, run)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs streams")
def test_post_optim_event(ranks):
    ranks(2).run(post_optim_event)


def without_gradients():
    def run(engine, model, seen):
        train(engine, model, seen)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                seen.append(("output", model(batch(0)).clone()))
        train(engine, model, seen)

    # After a forward without a backward, torch prefetches a gather that it does not use.
    compare(sharded_mlps, run, collectives=False)


def test_without_gradients(ranks):
    ranks(2).run(without_gradients)


def inference_first():
    model = sharded_mlps(ENGINES["fsdp_cpp"])
    with torch.inference_mode():
        expected = model(batch(0)).clone()
    output = model(batch(0))  # torch's engine throws here
    assert torch.equal(output, expected)
    output.sum().backward()


def test_inference_before_training(ranks):
    ranks(2).run(inference_first)


def recomputation(reentrant, selective=False):
    how = {"use_reentrant": reentrant}
    if selective:
        kept = [torch.ops.aten.addmm.default, torch.ops.aten.mm.default]
        how["context_fn"] = functools.partial(create_selective_checkpoint_contexts, kept)

    class Model(nn.Sequential):
        def forward(self, x):
            for layer in self:
                x = checkpoint(layer, x, **how)
            return x

    def make(engine):
        model = Model(*[Mlp() for _ in range(3)])
        for layer in model:
            engine.fully_shard(layer, mesh=mesh_of())
        return engine.fully_shard(model, mesh=mesh_of())

    def run(engine, model, seen):
        for step in range(2):
            loss = model(batch(step).requires_grad_()).square().mean()
            loss.backward()
            see_grads(model, seen, loss)

    # In a backward inside of backward, torch prefetches, and fsdp_cpp does not.
    compare(make, run, collectives=not reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(ranks, reentrant):
    ranks(2).run(recomputation, reentrant)


def test_selective_activation_checkpointing(ranks):
    ranks(2).run(recomputation, False, True)


class Recomputed(Mlp):
    """Recomputes its forward below its own __call__, as the layers of transformers do."""

    def __call__(self, *args):
        return checkpoint(super().__call__, *args, use_reentrant=False)


def recomputation_below_call():
    def make(engine):
        model = nn.Sequential(*[Recomputed() for _ in range(3)])
        for layer in model:
            engine.fully_shard(layer, mesh=mesh_of())
        return engine.fully_shard(model, mesh=mesh_of())

    compare(make)


def test_activation_checkpointing_below_call(ranks):
    ranks(2).run(recomputation_below_call)


def gradient_hooks():
    def run(engine, model, seen):
        for name, param in model.named_parameters():
            param.register_post_accumulate_grad_hook(
                lambda param, name=name: seen.append((name, whole(param.grad)))
            )
        train(engine, model, seen)

    compare(sharded_mlps, run, collectives=False)  # the hook gathers


def test_post_accumulate_grad_hooks(ranks):
    ranks(2).run(gradient_hooks)


def two_roots():
    def make(engine):
        return nn.ModuleDict({name: sharded_mlps(engine, layers=2) for name in ("one", "two")})

    def run(engine, model, seen):
        engine.share_comm_ctx([model["one"], model["two"]])
        for step in range(3):
            loss = (model["one"](batch(step)) + model["two"](batch(step + 7))).square().mean()
            loss.backward()
            see_grads(model, seen, loss)

    compare(make, run, collectives=False)  # torch's roots share prefetches from the second step on


def test_two_roots(ranks):
    ranks(2).run(two_roots)


def scaler_and_clipping():
    def run(engine, model, seen):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler(DEVICE, init_scale=4.0)
        for step in range(3):
            loss = model(batch(step)).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            seen.append(("norm", whole(norm)))
            see_grads(model, seen, loss)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    compare(sharded_mlps, run)


def test_grad_scaler_and_clipping(ranks):
    ranks(2).run(scaler_and_clipping)


def autocast():
    def run(engine, model, seen):
        for step in range(3):
            with torch.autocast(DEVICE, dtype=torch.bfloat16):
                loss = model(batch(step)).float().square().mean()
            loss.backward()
            see_grads(model, seen, loss)

    compare(sharded_mlps, run)


def test_autocast(ranks):
    ranks(2).run(autocast)


def backward_twice():
    def run(engine, model, seen):
        output = model(batch(0))
        output.square().mean().backward(retain_graph=True)
        output.mean().backward()
        see_grads(model, seen, output.mean())

    compare(sharded_mlps, run)


def test_two_backwards_of_a_forward(ranks):
    ranks(2).run(backward_twice)


def backward_with_a_graph():
    def run(engine, model, seen):
        train(engine, model, seen)
        loss = model(batch(0)).square().mean()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # .grad and the graph refer to each other
            loss.backward(create_graph=True)
        see_grads(model, seen, loss)
        with torch.no_grad():
            loss = model(batch(1)).square().mean()
        see_grads(model, seen, loss)
        model.zero_grad()
        train(engine, model, seen)

    compare(sharded_mlps, run, collectives=False)  # the graph keeps the parameters whole for a while


def test_a_backward_that_makes_a_graph(ranks):
    ranks(2).run(backward_with_a_graph)


def forward_twice():
    def run(engine, model, seen):
        for step in range(2):
            loss = (model(batch(step)) * model(batch(step + 5))).mean()
            loss.backward()
            see_grads(model, seen, loss)

    compare(sharded_mlps, run)


def test_two_forwards_of_a_backward(ranks):
    ranks(2).run(forward_twice)


def after_an_error(where):
    def run(engine, model, seen):
        class Fail(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, grad):
                raise KeyboardInterrupt if where == "interrupt" else OSError("in backward")

        handle = None
        if where in ("forward", "interrupt"):

            def fail(*_):
                raise KeyboardInterrupt if where == "interrupt" else OSError("in forward")

            handle = model[1].down.register_forward_pre_hook(fail)
        with contextlib.suppress(OSError, KeyboardInterrupt):
            output = model(batch(0))
            Fail.apply(output).sum().backward()
        if handle is not None:
            handle.remove()
        if engine is ENGINES["torch"]:
            model.reset_iter_state()
        for param in model.parameters():
            param.grad = None
        train(engine, model, seen)

    compare(sharded_mlps, run, collectives=False)


@needs_torch_2_13
@pytest.mark.parametrize("where", ["forward", "backward", "interrupt"])
def test_training_goes_on_after_an_error(ranks, where):
    ranks(2).run(after_an_error, where)
