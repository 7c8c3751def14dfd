// A C++ operator of attention's signature that does nothing: what torch's dispatcher costs by itself.
#include <torch/library.h>

static at::Tensor noop(const at::Tensor &q, const at::Tensor &, const at::Tensor &, bool, std::optional<double>)
{
    return q;
}

TORCH_LIBRARY_FRAGMENT(layerzero_bench, library)
{
    library.def("native(Tensor(a) q, Tensor k, Tensor v, bool causal=True, float? scale=None) -> Tensor(a)");
}

TORCH_LIBRARY_IMPL(layerzero_bench, CompositeExplicitAutograd, library) { library.impl("native", &noop); }
