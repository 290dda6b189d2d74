// The planner's kernel as a function on the CPU.
#include "planner/plan_tree.cu"

namespace prefixkit {
int dynamic_shared[58 * 1024];
static PlanTree arguments;
}  // namespace prefixkit

extern "C" void plan_on_cpu(const prefixkit::PlanTree* a) {
    prefixkit::arguments = *a;
    emulation::run(1, [] { prefixkit::plan_tree(prefixkit::arguments); });
}
