// LoRA adapters beside linears whose kernels do not add them. See kernels.h.
#include <omp.h>

#include <algorithm>

#include "lora.h"
#include "multiply.h"

namespace cas {
namespace {

template <class T>
void lora_add(const CasLoraAdd& a) {
    const int64_t rows = a.lora.num_parts * a.lora.rank;
#pragma omp parallel num_threads(a.num_threads) if (a.num_tokens > 1)
    {
        float* h = static_cast<float*>(scratch(sizeof(float) * rows));
#pragma omp for schedule(static)
        for (int64_t token = 0; token < a.num_tokens; ++token) {
            const T* y = static_cast<const T*>(a.y) + token * a.y_stride;
            T* out = static_cast<T*>(a.out) + token * a.out_features;
            if (a.lora.index[token] == 0) {
                std::copy(y, y + a.out_features, out);
                continue;
            }
            shrink(a.lora, token, static_cast<const T*>(a.x) + token * a.x_stride, a.in_features, h);
            for (int64_t c = 0; c < a.out_features; c += kLanes) {
                const int n = int(std::min<int64_t>(kLanes, a.out_features - c));
                const f32x16 sum = expand<T>(a.lora, a.out_features, token, h, c, n);
                if (n == kLanes) store16(out + c, load16(y + c) + sum);
                else store_part(out + c, load_part(y + c, n) + sum, n);
            }
        }
    }
}

}  // namespace
}  // namespace cas

extern "C" void cas_lora_add(const CasLoraAdd* args) {
    if (args->dtype == CAS_BFLOAT16) cas::lora_add<cas::bf16>(*args);
    else cas::lora_add<float>(*args);
}
