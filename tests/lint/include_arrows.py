"""Checks that the rooms of src/ include each other in one direction only.

The table below is the architecture: a room may include itself and the rooms it
lists. It also keeps some names in the one file or room that may spell them.
"""

import pathlib
import re
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]

MAY_INCLUDE = {
    "base": set(),
    "layout": {"base"},  # meshes, placements and boxes as integers
    "runtime": {"base"},
    "launch": {"base", "runtime"},
    "process_group": {"base", "layout", "runtime", "launch"},
}
# A room and all the rooms below it.
MAY_INCLUDE["mesh"] = MAY_INCLUDE["process_group"] | {"process_group"}
MAY_INCLUDE["observe"] = MAY_INCLUDE["process_group"] | {"process_group"}
MAY_INCLUDE["tensor"] = MAY_INCLUDE["mesh"] | {"mesh"}
MAY_INCLUDE["collective"] = MAY_INCLUDE["tensor"] | {"tensor"}
MAY_INCLUDE["param"] = MAY_INCLUDE["collective"] | {"collective"}
MAY_INCLUDE["group"] = MAY_INCLUDE["param"] | {"param", "observe"}
MAY_INCLUDE["optim"] = MAY_INCLUDE["param"] | {"param"}
MAY_INCLUDE["state"] = MAY_INCLUDE["group"] | {"group"}
MAY_INCLUDE["module"] = MAY_INCLUDE["state"] | {"state"}
MAY_INCLUDE["float8"] = MAY_INCLUDE["module"] | {"module"}
MAY_INCLUDE["offload"] = MAY_INCLUDE["module"] | {"module", "optim"}
MAY_INCLUDE["parallel"] = MAY_INCLUDE["module"] | {"module"}
MAY_INCLUDE["state_dict"] = MAY_INCLUDE["module"] | {"module", "optim"}
MAY_INCLUDE["checkpoint"] = MAY_INCLUDE["tensor"] | {"tensor", "state_dict"}

# Room of each public header; one that is missing here is an error.
PUBLIC = {
    "detail/forward_call.h": "module",
    "detail/forward_scope.h": "state",
    "detail/forward_signature.h": "module",
    "detail/hooked_base.h": "module",
    "detail/recompute_scope.h": "state",
    "detail/recomputed_call.h": "module",
    "detail/repeatable.h": "module",
    "activation_checkpoint_options.h": "state",
    "activation_checkpointing.h": "module",
    "call.h": "module",
    "checkpoint.h": "checkpoint",
    "checkpoint_tools.h": "checkpoint",
    "clip_grad_norm.h": "optim",
    "comm.h": "collective",
    "debug.h": "observe",
    "device_budget.h": "param",
    "device_mesh.h": "mesh",
    "distributed.h": "process_group",
    "dtensor.h": "tensor",
    "error.h": "base",
    "export.h": "base",
    "extension.h": "param",
    "float8.h": "float8",
    "fsdp.h": None,  # the umbrella: for users only
    "fully_shard.h": "module",
    "grad_scaler.h": "optim",
    "hookable.h": "module",
    "hooked.h": "module",
    "init_options.h": "launch",
    "launch.h": "launch",
    "low_precision_adamw.h": "optim",
    "memory.h": "observe",
    "meta_init.h": "module",
    "module_ref.h": "module",
    "muon.h": "optim",
    "nn.h": "module",
    "optim.h": "optim",
    "parallel_cross_entropy.h": "parallel",
    "param.h": "param",
    "placement.h": "layout",
    "policy.h": "param",
    "process_group.h": "process_group",
    "random_state.h": "state_dict",
    "redistribute.h": "parallel",
    "reduce_op.h": "layout",
    "save_policy.h": "state",
    "sharding_plan.h": "observe",
    "state_dict.h": "state_dict",
    "step_in_backward.h": "offload",
    "tensor_parallel.h": "parallel",
    "tie_weights.h": "module",
    "trace.h": "observe",
    "tree.h": "module",
    "version.h": "base",
}

# What -> the only files (relative to src/) that may contain it.
ONLY_IN = {
    r"_allgather_base|_reduce_scatter_base|alltoall_base": r"process_group/c10d_adapter\.",
    r"<(cuda|ATen/cuda|c10/cuda)|ProcessGroupNCCL\.hpp": r"process_group/nccl/",
    r"ProcessGroupGloo\.hpp|<gloo/": r"process_group/gloo/",
    r"<torch/torch\.h>|<torch/nn": r"(float8|module|parallel)/",
    r"\bgetenv\b": r"(launch/launch_env|runtime/log)\.cpp",
}

# The rooms on top of the engine include public headers and these rooms, which know nothing of the
# engine.
BELOW_THE_ENGINE = {"base", "layout", "runtime"}
# The other internal headers that they need, and why.
INTERNAL: dict[str, set[str]] = {
    "float8": set(),
    "offload": {
        "param/param_placement.h",  # errors name the parameter
        "process_group/rank_context.h",  # its thread acts as the rank that started it
    },
    "optim": {
        "param/fsdp_param.h",  # clip_grad_norm_ compares gradients with the shards' sizes
        "param/param_placement.h",  # norms and whole matrices need the ranks that share a parameter
    },
    "parallel": {
        "module/module_tree.h",  # finds modules and their parameters by name
        "param/tensor_piece.h",  # tells the engine which piece of a tensor a rank has
        "process_group/by_group.h",  # remembers for each group which dims are divided unevenly
        "process_group/observer.h",  # labels its collectives for CommDebugMode and Trace
        "state/autograd_hooks.h",  # makes views behind its autograd nodes
        "tensor/redistribute.h",  # the moves without autograd
    },
    "state_dict": {
        "module/module_tree.h",  # names parameters and buffers
        "optim/moment.h",  # the packed state of LowPrecisionAdamW
        "param/param_placement.h",  # a parameter's placement becomes that of its DTensor
        "process_group/exchange.h",  # rank 0 sends whole tensors over the world's device
        "tensor/redistribute.h",  # gathers whole tensors, and divides them again
    },
    "checkpoint": {
        "process_group/exchange.h",  # ranks report to rank 0 by the store, from any thread
        "process_group/rank_context.h",  # a save in the background belongs to a rank, not a thread
    },
}
MOST_INTERNAL = 17  # make this smaller when a header goes, and larger only for a new room

# Programs include public headers, their own ones, and these.
PROGRAMS: dict[str, set[str]] = {
    "cli": set(),
    "benchmarks": set(),
    "examples": set(),
    "python/src": {  # puts the engine under Python modules, as hooked.h does under C++ modules
        "base/check.h",
        "base/text.h",
        "cli/report/report.h",  # makes the page of a run
        "fsdp/detail/forward_scope.h",  # runs a module's forward between its hooks
        "optim/low_precision_step.h",  # the arithmetic of LowPrecisionAdamW
        "optim/matrix_steps.h",  # the exchanges of Muon
        "param/fsdp_param.h",
        "param/user_param.h",  # who holds a parameter at rest
        "process_group/agreement.h",  # waits for comparisons without Python's lock
        "process_group/group_state.h",  # makes a group of one of torch.distributed
        "process_group/observer.h",  # names the call that failed
        "process_group/rank_context.h",  # threads as ranks
        "state/fsdp_state.h",
    },
}

# Words that have another meaning in the docs, so that code in these folders must not use them as
# names. Comments and texts may.
RESERVED = {
    "src/checkpoint": r"\bplaces?_?\b",  # of a placed gather, and of a placement
    "src/group": r"checkpoint",  # what save() writes, and modules that recompute
    "src/param": r"checkpoint",
}
NOT_CODE = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)

INCLUDE = re.compile(r'^\s*#\s*include\s+(?:"([^"]+)"|<fsdp/([^>]+)>)', re.MULTILINE)


def sources(folder):
    return [*folder.rglob("*.h"), *folder.rglob("*.cpp")]


def internal_includes(path):
    found = INCLUDE.findall(path.read_text())
    return [a or f"fsdp/{b}" for a, b in found if a or b.startswith("detail/")]


def room_of(included, public):
    if public:
        return PUBLIC.get(public, "unknown public header")
    return included.split("/")[0]


def problems(root):
    found = []
    for path in sources(root / "src"):
        name = path.relative_to(root / "src").as_posix()
        if "gloo/declarations" in name:
            continue
        room = name.split("/")[0]
        text = path.read_text()
        if room not in MAY_INCLUDE:
            found.append(f"{name}: there is no room '{room}'")
            continue
        for match in INCLUDE.finditer(text):
            target = room_of(*match.groups())
            if target != room and target not in MAY_INCLUDE[room]:
                found.append(f"{name}: {room} must not include {match[0].strip()} of {target}")
            elif room in INTERNAL and match[1] and target not in {room} | BELOW_THE_ENGINE:
                if match[1] not in INTERNAL[room]:
                    found.append(f"{name}: {room} may include public headers, not {match[1]}")
        for pattern, allowed in ONLY_IN.items():
            if re.search(pattern, text) and not re.match(allowed, name):
                found.append(f"{name}: contains {pattern}, which belongs to {allowed}")
        word = RESERVED.get(f"src/{room}")
        for match in re.finditer(word, NOT_CODE.sub("", text)) if word else []:
            found.append(f"{name}: '{match[0]}' means something else; use another name")
    headers = root / "include" / "fsdp"
    for path in headers.rglob("*.h"):
        room = PUBLIC.get(path.relative_to(headers).as_posix(), "unknown")
        if room == "unknown":
            found.append(f"{path.name}: a public header without a room")
        for match in INCLUDE.finditer(path.read_text()):
            target = room_of(*match.groups())
            if room in MAY_INCLUDE and target != room and target not in MAY_INCLUDE[room]:
                found.append(f"{path.name}: {room} must not include {match[0].strip()}")
    for folder, needed in PROGRAMS.items():
        for path in sources(root / folder):
            for included in internal_includes(path):
                is_own = included.startswith(f"{folder}/") or (path.parent / included).exists()
                if not is_own and included not in needed:
                    found.append(f"{folder}/{path.name}: includes {included}, which is not public")
    return found


class IncludeArrows(unittest.TestCase):
    def test_this_tree_follows_the_rooms(self):
        self.assertEqual(problems(ROOT), [])

    def test_no_room_needs_more_of_the_engine(self):
        needed = {(room, header) for room in INTERNAL for header in INTERNAL[room]}
        self.assertLessEqual(len(needed), MOST_INTERNAL)
        included = {
            (room, header)
            for room in INTERNAL
            for path in (ROOT / "src" / room).iterdir()
            for header, _ in INCLUDE.findall(path.read_text())
        }
        for folder, headers in PROGRAMS.items():
            needed |= {(folder, header) for header in headers}
            for path in sources(ROOT / folder):
                included |= {(folder, header) for header in internal_includes(path)}
        self.assertEqual(needed - included, set(), "take out what nobody includes")

    def test_wrong_arrows_are_caught(self):
        bad = {
            "src/base/x.h": '#include "layout/mesh_layout.h"\n',
            "src/layout/x.h": '#include "mesh/x.h"\n',
            "src/mesh/x.cpp": "#include <fsdp/dtensor.h>\n",
            "src/mesh/y.cpp": "#include <fsdp/fsdp.h>\n",
            "src/tensor/x.cpp": "backend._allgather_base(a, b);\n",
            "src/attic/x.cpp": "\n",
            "src/checkpoint/x.cpp": '#include "tensor/redistribute.h"\n',
            "src/offload/x.cpp": '#include "param/fsdp_param.h"\n',
            "include/fsdp/new.h": "\n",
            "src/checkpoint/y.cpp": "auto place = 1; // its place\n",
            "src/group/x.h": 'bool is_checkpointed; const char* text = "checkpointed";\n',
            "include/fsdp/reduce_op.h": "#include <fsdp/dtensor.h>\n",
            "cli/x.cpp": '#include "base/text.h"\n',
            "benchmarks/x.cpp": "#include <fsdp/detail/forward_scope.h>\n",
            "examples/a/x.cpp": '#include "state/fsdp_state.h"\n',
            "python/src/x.cpp": '#include "group/param_group.h"\n',
        }
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for name, text in bad.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text)
            self.assertEqual(len(problems(root)), len(bad), problems(root))


if __name__ == "__main__":
    unittest.main()
