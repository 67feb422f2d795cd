"""A digest of the weights: of their bits, whatever the mesh."""

import torch

import meshpar
from meshpar.models import Transformer, TransformerConfig
from meshpar.passes import passes_for
from meshpar.tensors.digests import digest_of_elements
from meshpar.testing import on_ranks

SHAPE = TransformerConfig(vocab_size=97, dim=32, layers=2, heads=4, hidden=65, max_positions=32, tied=True)
MESHES = (
    *("dp_shard=4", "dp_replicate=4", "dp_replicate=2,dp_shard=2", "tp=4", "dp_shard=2,tp=2", "dp_shard=1,cp=4"),
    "pp=2,dp_shard=2",
)


def of_one_process(state: dict[str, torch.Tensor]) -> int:
    sums = sum(int(digest_of_elements(tensor, name)) for name, tensor in state.items())
    return sums % 2**52


@on_ranks(4)
def test_every_mesh_has_the_digest_of_the_whole_weights() -> None:
    digests = dict[str, int]()
    for mesh in MESHES:
        with torch.device("meta"):
            model = Transformer(SHAPE)
        par = meshpar.Plan(mesh, passes_for(mesh)).apply(model, device_type="cpu").materialize(seed=0)
        digests[mesh] = par.digest()
        if "pp" not in mesh:
            whole = {name: par.whole(parameter).detach() for name, parameter in par.module.named_parameters()}
            assert digests[mesh] == of_one_process(whole), mesh
        with torch.no_grad():
            for parameter in par.module.parameters():
                parameter.mul_(-1.0)
        assert par.digest() != digests[mesh], mesh
    assert len(set(digests.values())) == 1, digests


def test_a_digest_is_of_bits_places_and_names() -> None:
    tensor = torch.arange(24.0).view(4, 6)
    first = digest_of_elements(tensor, "weight")
    others = (tensor.flip(0), tensor.double(), tensor.bfloat16(), -tensor)
    digests = [int(digest_of_elements(other, "weight")) for other in others]
    digests += [int(first), int(digest_of_elements(tensor, "bias"))]
    assert len({*digests}) == len(digests)
    for dtype in (torch.bfloat16, torch.float64, torch.bool, torch.complex64, torch.complex128):
        one, other = tensor.to(dtype), tensor.t().contiguous().t().to(dtype)
        assert digest_of_elements(one, "weight") == digest_of_elements(other, "weight")
    assert digest_of_elements(tensor[:0], "weight") != 0, "a tensor without elements counts by its name"
