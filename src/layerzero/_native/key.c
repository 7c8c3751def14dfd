/* A call as words: its tensors, what values.c makes of its other arguments, and the eager state.
 *
 * The exact key holds, for each tensor, dtype, device, sizes, strides and the low bits of its address; every other
 * argument by value; and the eager state. Whatever a limit reads is in it. Of the coarse key, sizes and strides are
 * classes: the bit length of a size; whether a stride is 0, 1, or else which power of two up to 16 bytes divides it (of
 * int64, none but one element). All
 * calls of one coarse key have the same alignment, density of the last axis, empty axes and axes of one element.
 *
 * The negative bit is in neither: DLPack does not tell it. A plan whose kernel would misread it asks (table.c).
 */
#include "hot.h"

#define ADDRESS_BITS 15 /* alignment beyond 16 bytes is not told apart, as in TensorFacts */

/* Zero bits of a stride that tell alignment up to 16 bytes; of int64, which holds places and counts, up to one element:
 * a row of positions would be of another class with every second number of tokens. */
static inline int told_bits(uint64_t header)
{
    int code = header >> 16 & 0xff, bytes = (int)((header >> 24 & 0xff) * (header >> 32 & 0xff) + 7) / 8, bits = 0;
    if (code == DL_INT && bytes == 8)
        return 0;
    for (; bytes < 16; bytes *= 2)
        bits++;
    return bits;
}

static inline uint64_t stride_class(int64_t stride, int told)
{
    if (stride == 0 || stride == 1)
        return (uint64_t)stride;
    int lowest = __builtin_ctzll((uint64_t)stride);
    return 2 + (uint64_t)(lowest > told ? told : lowest);
}

/* Write a tensor's words. Returns 0 for a tensor whose memory is not there (freed, functional, all zeros in theory). */
static int put_tensor(Key *key, int number, const DLTensor *tensor, int grad)
{
    uintptr_t address = (uintptr_t)tensor->data + tensor->byte_offset;
    int ndim = tensor->ndim;
    uint64_t *words = key->exact + key->exact_count;
    words[0] = 1u | (uint64_t)grad << 1 | (uint64_t)(address & ADDRESS_BITS) << 4 | (uint64_t)ndim << 8 |
               (uint64_t)tensor->code << 16 | (uint64_t)tensor->bits << 24 | (uint64_t)tensor->lanes << 32 |
               (uint64_t)tensor->device_type << 40 | (uint64_t)tensor->device_id << 48;
    int64_t reach = 1;
    int empty = 0;
    for (int axis = 0; axis < ndim; axis++) {
        int64_t size = tensor->shape[axis], stride = tensor->strides[axis];
        words[1 + axis] = (uint64_t)size;
        words[1 + ndim + axis] = (uint64_t)stride;
        reach += (size - 1) * stride;
        empty |= size == 0;
    }
    if (!empty && tensor->data == NULL)
        return 0;
    key->start[number] = key->exact_count;
    key->ndim[number] = ndim;
    key->exact_count += 1 + 2 * ndim;
    key->low[number] = empty ? 0 : address;
    key->high[number] = empty ? 0 : address + (uintptr_t)reach * (uintptr_t)((tensor->bits * tensor->lanes + 7) / 8);
    return 1;
}

/* What makes writing into a tensor an error is looked at on every call, and is not in the key; but for two tensors that may
 * lie in each other's memory: how far apart they start is the last word, so that what was proved of one place is not
 * believed of another. Two such pairs in one call make no key. */
static int may_be_written(Function *self, PyObject *const *values, Key *key, int grad)
{
    uint64_t apart = 0;
    int pairs = 0;
    for (int i = 0; i < self->mutated_count; i++) {
        const Mutated *mutated = &self->mutated[i];
        int each = mutated->tensor;
        PyObject *tensor = values[self->tensor_parameter[each]];
        int asks = grad ? requires_grad(tensor) : 0;
        int refused = asks > 0 ? is_leaf(tensor) : asks;
        if (!refused && (refused = is_inference(tensor)) > 0) {
            int inside = inference_enabled();
            refused = inside < 0 ? -1 : !inside;
        }
        if (refused)
            return refused < 0 ? -1 : 0;
        for (int other = 0; other < self->tensor_count; other++) {
            if (key->ndim[other] < 0 || key->low[other] == key->high[other])
                continue;
            int meet = key->low[each] < key->high[other] && key->low[other] < key->high[each];
            if ((mutated->apart >> other & 1 && meet) ||
                (mutated->not_start >> other & 1 && key->low[each] == key->low[other]))
                return 0;
            if (!(mutated->not_start >> other & 1) || !meet || other < each)
                continue; /* a pair stands with each of its tensors */
            if (apart != 0)
                return 0;
            apart = (uint64_t)(key->low[other] - key->low[each]);
        }
        pairs |= mutated->not_start != 0;
    }
    if (pairs)
        key->exact[key->exact_count++] = apart;
    return 1;
}

int key_make(Function *self, PyObject *const *values, Key *key)
{
    EagerState state;
    int made = state_read(&state);
    if (made <= 0)
        return made;
    int wants_gradient = 0;
    key->exact_count = 1;
    made = put_values(self, values, key);
    if (made <= 0)
        return made;
    for (int i = 0; i < self->tensor_count; i++) {
        const Parameter *parameter = &self->parameters[self->tensor_parameter[i]];
        PyObject *value = values[self->tensor_parameter[i]];
        if (value == Py_None && parameter->kind == OPTIONAL_TENSOR) {
            key->ndim[i] = -1;
            key->start[i] = key->exact_count;
            key->exact[key->exact_count++] = 0; /* no tensor's word is 0 */
            continue;
        }
        DLTensor tensor;
        made = read_tensor(value, &tensor);
        if (made <= 0)
            return made;
        int grad = 0;
        /* a required tensor's wish is told once for all; after the first that has it, the others need not be asked */
        if (state.grad && (parameter->kind == OPTIONAL_TENSOR || !wants_gradient)) {
            grad = requires_grad(value);
            if (grad < 0)
                return -1;
            wants_gradient |= grad;
        }
        if (!put_tensor(key, i, &tensor, parameter->kind == OPTIONAL_TENSOR ? grad : 0))
            return 0;
    }
    uint64_t answers = 0;
    if (self->asked_count && (made = asked_read(self, key, &answers)) <= 0)
        return made;
    key->exact[0] = (uint64_t)(wants_gradient | state.deterministic << 1 | state.autocast << 2) | answers << 3 |
                    (uint64_t)(uint32_t)state.threads << 32;
    return self->mutated_count ? may_be_written(self, values, key, state.grad) : 1;
}

int key_header(const Function *self)
{
    int words = 2; /* the eager state, and the tags of the values */
    for (int i = 0; i < self->count; i++) {
        enum Kind kind = self->parameters[i].kind;
        words += kind == SEQUENCE ? MAX_SEQUENCE : kind == TENSOR || kind == OPTIONAL_TENSOR ? 0 : 1;
    }
    return words;
}

void key_make_coarse(Function *self, Key *key)
{
    int header = key->start[0], count = header;
    memcpy(key->coarse, key->exact, (size_t)header * sizeof key->exact[0]);
    for (int i = 0; i < self->tensor_count; i++) {
        const uint64_t *words = key->exact + key->start[i];
        int ndim = key->ndim[i];
        uint64_t classes = 0;
        key->coarse[count++] = words[0];
        if (ndim < 0)
            continue;
        int told = told_bits(words[0]);
        for (int axis = 0; axis < ndim; axis++) /* 6 and 3 bits, for at most 6 axes */
            classes = classes << 9 | (uint64_t)bit_length(words[1 + axis]) << 3 |
                      stride_class((int64_t)words[1 + ndim + axis], told);
        key->coarse[count++] = classes;
    }
    int last = self->tensor_count - 1, end = key->start[last] + 1 + (key->ndim[last] < 0 ? 0 : 2 * key->ndim[last]);
    if (key->exact_count > end) /* how far apart tensors start that lie in each other's memory */
        key->coarse[count++] = key->exact[end];
    key->coarse_count = count;
}

uint64_t key_hash(const uint64_t *words, int count)
{
    /* Four lanes, since one multiplication waits for the one before; the constants are odd and otherwise arbitrary. */
    uint64_t lanes[4] = {0x9E3779B97F4A7C15u, 0xC2B2AE3D27D4EB4Fu, 0x165667B19E3779F9u, 0x27D4EB2F165667C5u};
    int i = 0;
    for (; i + 4 <= count; i += 4)
        for (int lane = 0; lane < 4; lane++)
            lanes[lane] = (lanes[lane] ^ words[i + lane]) * 0x9FB21C651E98DF25u;
    for (; i < count; i++)
        lanes[i & 3] = (lanes[i & 3] ^ words[i]) * 0x9FB21C651E98DF25u;
    uint64_t hash = (uint64_t)count;
    for (int lane = 0; lane < 4; lane++)
        hash = (hash ^ (lanes[lane] >> 29) ^ lanes[lane]) * 0xD6E8FEB86659FD93u;
    return hash ^ hash >> 32;
}
