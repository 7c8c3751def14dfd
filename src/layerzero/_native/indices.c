/* Whether indices in memory are where they must be: a comparison for each, before a kernel follows them. */
#include "hot.h"

#define MAX_INDEX_AXES 4

int integers(PyObject *tensor, DLTensor *out)
{
    int read = read_tensor(tensor, out);
    if (read <= 0)
        return read;
    int empty = 0;
    for (int axis = 0; axis < out->ndim; axis++)
        empty |= out->shape[axis] == 0;
    return out->device_type == DL_CPU && out->code == DL_INT && (out->bits == 32 || out->bits == 64) &&
           out->ndim <= MAX_INDEX_AXES && out->lanes == 1 && (out->data != NULL || empty);
}

static inline int64_t value_at(const DLTensor *tensor, const char *place)
{
    return tensor->bits == 64 ? *(const int64_t *)place : *(const int32_t *)place;
}

/* Whether `count` numbers, `step` bytes apart, are all from `low` to below `high`. Branches would cost more. */
static int row_within(const DLTensor *tensor, const char *place, int64_t count, int64_t step, int64_t low, int64_t high)
{
    const uint64_t width = high > low ? (uint64_t)high - (uint64_t)low : 0;
    int outside = 0;
    for (int64_t i = 0; i < count; i++)
        outside |= (uint64_t)value_at(tensor, place + i * step) - (uint64_t)low >= width;
    return !outside;
}

static int all_within(const DLTensor *tensor, int axis, const char *place, int64_t low, int64_t high)
{
    const int64_t size_bytes = tensor->bits / 8;
    if (tensor->ndim == 0)
        return row_within(tensor, place, 1, size_bytes, low, high);
    const int64_t step = tensor->strides[axis] * size_bytes, count = tensor->shape[axis];
    if (axis == tensor->ndim - 1)
        return row_within(tensor, place, count, step, low, high);
    for (int64_t i = 0; i < count; i++)
        if (!all_within(tensor, axis + 1, place + i * step, low, high))
            return 0;
    return 1;
}

static const char *data_of(const DLTensor *tensor) { return (const char *)tensor->data + tensor->byte_offset; }

/* Slots of a table that finds a number twice; for few numbers it lies on the stack. */
#define FEW_SLOTS 1024

static inline size_t first_slot(int64_t value, size_t mask)
{
    return (size_t)(((uint64_t)value * UINT64_C(0x9E3779B97F4A7C15)) >> 32) & mask;
}

/* Whether no number of a row from 0 on comes twice; -1 without memory. Rising rows need no table. */
static int row_distinct(const DLTensor *tensor, const char *place, int64_t count, int64_t step)
{
    int64_t last = -1, rising = 1;
    for (int64_t i = 0; i < count; i++) {
        const int64_t value = value_at(tensor, place + i * step);
        rising &= value < 0 || value > last;
        last = value < 0 ? last : value;
    }
    if (rising)
        return 1;
    size_t slots = 16;
    while (slots < 2 * (size_t)count)
        slots *= 2;
    int64_t few[FEW_SLOTS];
    int64_t *table = slots <= FEW_SLOTS ? few : PyMem_Malloc(slots * sizeof(int64_t));
    if (table == NULL)
        return PyErr_NoMemory(), -1;
    memset(table, 0xff, slots * sizeof(int64_t)); /* -1 */
    int distinct = 1;
    for (int64_t i = 0; i < count && distinct; i++) {
        const int64_t value = value_at(tensor, place + i * step);
        if (value < 0)
            continue;
        size_t slot = first_slot(value, slots - 1);
        while (table[slot] >= 0 && table[slot] != value)
            slot = (slot + 1) & (slots - 1);
        distinct = table[slot] < 0;
        table[slot] = value;
    }
    if (table != few)
        PyMem_Free(table);
    return distinct;
}

static int all_distinct(const DLTensor *tensor, int axis, const char *place)
{
    const int64_t step = tensor->strides[axis] * (tensor->bits / 8), count = tensor->shape[axis];
    if (axis == tensor->ndim - 1)
        return row_distinct(tensor, place, count, step);
    int distinct = 1;
    for (int64_t i = 0; i < count && distinct > 0; i++)
        distinct = all_distinct(tensor, axis + 1, place + i * step);
    return distinct;
}

PyObject *indices_distinct(PyObject *module, PyObject *tensor)
{
    (void)module;
    DLTensor read;
    int plain = integers(tensor, &read);
    if (plain <= 0)
        return plain < 0 ? NULL : Py_NewRef(Py_None);
    int distinct = read.ndim == 0 ? 1 : all_distinct(&read, 0, data_of(&read));
    return distinct < 0 ? NULL : PyBool_FromLong(distinct);
}

PyObject *indices_within(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *tensor;
    long long low, high;
    DLTensor read;
    if (!PyArg_ParseTuple(args, "OLL:within", &tensor, &low, &high))
        return NULL;
    int plain = integers(tensor, &read);
    if (plain <= 0)
        return plain < 0 ? NULL : Py_NewRef(Py_None);
    return PyBool_FromLong(all_within(&read, 0, data_of(&read), low, high));
}

PyObject *indices_firsts_within(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *table_object, *counts_object;
    long long per, high;
    DLTensor table, counts;
    if (!PyArg_ParseTuple(args, "OOLL:firsts_within", &table_object, &counts_object, &per, &high))
        return NULL;
    int plain = integers(table_object, &table);
    if (plain > 0)
        plain = integers(counts_object, &counts);
    if (plain < 0)
        return NULL;
    if (plain == 0 || per < 1 || table.ndim != 2 || counts.ndim != 1 || counts.shape[0] != table.shape[0])
        Py_RETURN_NONE;
    const int64_t bytes = table.bits / 8, count_bytes = counts.bits / 8;
    for (int64_t row = 0; row < table.shape[0]; row++) {
        int64_t count = value_at(&counts, data_of(&counts) + row * counts.strides[0] * count_bytes);
        int64_t used = count < 1 ? 0 : (count - 1) / per + 1;
        if (used > table.shape[1])
            used = table.shape[1];
        if (!row_within(&table, data_of(&table) + row * table.strides[0] * bytes, used, table.strides[1] * bytes, 0,
                        high))
            Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}
