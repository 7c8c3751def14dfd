/* What a tensor's memory looks like, read from C without torch's headers.
 *
 * torch's DLPack exchange API describes any tensor in 35 ns. Where torch has them, the C functions that it made for
 * ahead-of-time compiled models tell the same in 8; they take a pointer to where a Python tensor keeps its C++ one,
 * which is found out at import and never assumed. Each pair of dtype and device is read both ways once, and compared.
 */
#include "hot.h"

#if defined(__linux__)
#include <dlfcn.h>
#endif

#define MAX_DTYPES 64
#define MAX_DEVICES 32
#define HANDLE_AT 16 /* where a Python tensor keeps its C++ one, if `finds_handle` says so */

typedef struct {
    uint32_t major, minor;
    void *manager_context; /* the C++ tensor first */
    void (*deleter)(void *self);
} ManagedTensor; /* the head of DLPack's, version 1 */

typedef int32_t Status;

static struct {
    Status (*layout)(void *handle, int32_t *out); /* 0: strided */
    Status (*dtype)(void *handle, int32_t *out);
    Status (*device_type)(void *handle, int32_t *out);
    Status (*device_index)(void *handle, int32_t *out);
    Status (*ndim)(void *handle, int64_t *out);
    Status (*sizes)(void *handle, int64_t **out);
    Status (*strides)(void *handle, int64_t **out);
    Status (*address)(void *handle, void **out); /* for reading: a lazy clone stays one */
    _Bool (*requires_grad)(void *implementation); /* NULL like the next: torch's own property is asked */
    _Bool (*is_negated)(void *handle);
} torch_c;

static int handles_found; /* whether torch_c serves */

static struct {
    uint8_t known, code, bits, lanes;
} dtypes[MAX_DTYPES];

static struct {
    int known;
    int32_t type; /* as DLPack has it */
} devices[MAX_DEVICES];

/* Tensors of which DLPack's reader raised lately: raising costs most of a millisecond, asking first 100 ns each. */
static int wary;

static inline void *handle_of(PyObject *tensor) { return (char *)tensor + HANDLE_AT; }

/* Returns 0 where DLPack has to say it: an unknown dtype or device, no dense memory. */
static int read_by_handle(PyObject *object, DLTensor *out)
{
    void *handle = handle_of(object);
    int32_t layout, dtype, device, index;
    int64_t ndim;
    if (torch_c.layout(handle, &layout) || layout != 0 || torch_c.dtype(handle, &dtype) || dtype < 0 ||
        dtype >= MAX_DTYPES || !dtypes[dtype].known || torch_c.device_type(handle, &device) || device < 0 ||
        device >= MAX_DEVICES || !devices[device].known || torch_c.device_index(handle, &index) ||
        torch_c.ndim(handle, &ndim) || ndim > MAX_AXES || torch_c.sizes(handle, &out->shape) ||
        torch_c.strides(handle, &out->strides) || torch_c.address(handle, &out->data))
        return 0;
    out->device_type = devices[device].type;
    out->device_id = index < 0 ? 0 : index;
    out->ndim = (int32_t)ndim;
    out->code = dtypes[dtype].code;
    out->bits = dtypes[dtype].bits;
    out->lanes = dtypes[dtype].lanes;
    out->byte_offset = 0;
    return out->device_id < 256;
}

/* Compare what DLPack said with what torch's C functions say, and remember dtype and device where they agree. */
static void learn(PyObject *object, const DLTensor *told)
{
    void *handle = handle_of(object), *address;
    int32_t layout, dtype, device, index;
    int64_t ndim, *sizes, *strides;
    int agree = !torch_c.layout(handle, &layout) && layout == 0 && !torch_c.dtype(handle, &dtype) && dtype >= 0 &&
                dtype < MAX_DTYPES && !torch_c.device_type(handle, &device) && device >= 0 && device < MAX_DEVICES &&
                !torch_c.device_index(handle, &index) && (index < 0 ? 0 : index) == told->device_id &&
                !torch_c.ndim(handle, &ndim) && ndim == told->ndim && !torch_c.sizes(handle, &sizes) &&
                !torch_c.strides(handle, &strides) && !torch_c.address(handle, &address);
    int empty = 0;
    for (int64_t axis = 0; agree && axis < ndim; axis++) {
        agree = sizes[axis] == told->shape[axis] && strides[axis] == told->strides[axis];
        empty |= sizes[axis] == 0;
    }
    if (empty) /* what it is made of is told, where it lies is not */
        return;
    if (agree)
        agree = (char *)address == (char *)told->data + told->byte_offset &&
                (!devices[device].known || devices[device].type == told->device_type) &&
                (!dtypes[dtype].known || (dtypes[dtype].code == told->code && dtypes[dtype].bits == told->bits));
    if (!agree) {
        handles_found = 0;
        return;
    }
    devices[device].known = 1;
    devices[device].type = told->device_type;
    dtypes[dtype].code = told->code;
    dtypes[dtype].bits = told->bits;
    dtypes[dtype].lanes = (uint8_t)told->lanes;
    dtypes[dtype].known = 1;
}

int read_tensor(PyObject *object, DLTensor *out)
{
    if (!Py_IS_TYPE(object, tensor_type) && !Py_IS_TYPE(object, parameter_type))
        return 0;
    if (handles_found && read_by_handle(object, out))
        return 1;
    if (wary > 0) {
        int plain = is_plain(object);
        if (plain <= 0)
            return plain;
        wary--;
    }
    if (exchange->describe(object, out) != 0) {
        if (!PyErr_ExceptionMatches(PyExc_Exception))
            return -1;
        PyErr_Clear(); /* meta, sparse, nested, quantized, wrapped by a transform: Python knows what to do */
        wary = 64;
        return 0;
    }
    /* Eight-bit integers and narrower ones look alike here, and complex tensors may be conjugated. */
    int narrow = (out->code == DL_INT || out->code == DL_UINT) && out->bits <= 8;
    if (out->ndim > 0 && out->strides == NULL) /* older producers leave them out where memory is dense */
        return 0;
    int fits = !narrow && out->code != DL_COMPLEX && out->ndim <= MAX_AXES && out->device_id >= 0 &&
               out->device_id < 256 && out->lanes < 256 && out->device_type >= 0 && out->device_type < 256;
    if (fits && handles_found)
        learn(object, out);
    return fits;
}

int requires_grad(PyObject *tensor)
{
    if (handles_found && torch_c.requires_grad != NULL && /* the caller has read it, so it is a tensor */
        (Py_IS_TYPE(tensor, tensor_type) || Py_IS_TYPE(tensor, parameter_type)))
        return torch_c.requires_grad(*(void **)handle_of(tensor));
    return asks_for_gradients(tensor);
}

int is_negated(PyObject *tensor)
{
    if (handles_found && torch_c.is_negated != NULL &&
        (Py_IS_TYPE(tensor, tensor_type) || Py_IS_TYPE(tensor, parameter_type)))
        return torch_c.is_negated(handle_of(tensor));
    return has_negative_bit(tensor);
}

/* Whether the word at HANDLE_AT is the C++ tensor that DLPack's managed export holds, for every sample. */
static int finds_handle(PyObject *samples)
{
    int (*export)(void *object, ManagedTensor **out) = (int (*)(void *, ManagedTensor **))exchange->managed_from_object;
    if (export == NULL || tensor_type->tp_basicsize < HANDLE_AT + (Py_ssize_t)sizeof(void *))
        return 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(samples); i++) {
        PyObject *sample = PyTuple_GET_ITEM(samples, i);
        ManagedTensor *managed = NULL;
        if (export(sample, &managed) != 0 || managed == NULL) {
            PyErr_Clear();
            return 0;
        }
        int same = managed->major == 1 && managed->manager_context != NULL &&
                   *(void **)managed->manager_context == *(void **)handle_of(sample);
        if (managed->deleter != NULL)
            managed->deleter(managed);
        if (!same)
            return 0;
    }
    return 1;
}

/* Look for torch's C functions; `samples` are tensors of several kinds, with and without gradients and the negative
 * bit; without any, DLPack serves. */
int reader_setup(void *torch_cpu, void *c10, PyObject *samples)
{
    handles_found = 0;
    memset(dtypes, 0, sizeof dtypes);
    memset(devices, 0, sizeof devices);
    memset(&torch_c, 0, sizeof torch_c);
    if (!PyTuple_Check(samples)) {
        PyErr_SetString(PyExc_TypeError, "setup: wanted a tuple of tensors");
        return -1;
    }
#if defined(__linux__)
    if (torch_cpu == NULL || PyTuple_GET_SIZE(samples) == 0)
        return 0;
    const struct {
        void **place;
        const char *name;
    } wanted[] = {
        {(void **)&torch_c.layout, "aoti_torch_get_layout"},
        {(void **)&torch_c.dtype, "aoti_torch_get_dtype"},
        {(void **)&torch_c.device_type, "aoti_torch_get_device_type"},
        {(void **)&torch_c.device_index, "aoti_torch_get_device_index"},
        {(void **)&torch_c.ndim, "aoti_torch_get_dim"},
        {(void **)&torch_c.sizes, "aoti_torch_get_sizes"},
        {(void **)&torch_c.strides, "aoti_torch_get_strides"},
        {(void **)&torch_c.address, "torch_get_const_data_ptr"},
    };
    int all = 1;
    for (int i = 0; i < COUNT(wanted); i++)
        all &= (*wanted[i].place = dlsym(torch_cpu, wanted[i].name)) != NULL;
    handles_found = all && finds_handle(samples);
    if (!handles_found)
        return 0;
    DLTensor told;
    for (Py_ssize_t i = 0; handles_found && i < PyTuple_GET_SIZE(samples); i++) {
        PyObject *sample = PyTuple_GET_ITEM(samples, i);
        if (exchange->describe(sample, &told) != 0)
            return -1;
        learn(sample, &told);
    }
    torch_c.is_negated = (_Bool(*)(void *))dlsym(torch_cpu, "_ZN2at6native6is_negERKNS_6TensorE");
    torch_c.requires_grad = c10 == NULL ? NULL : (_Bool(*)(void *))dlsym(c10, "_ZNK3c1010TensorImpl13requires_gradEv");
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(samples); i++) { /* samples differ in both */
        PyObject *sample = PyTuple_GET_ITEM(samples, i);
        int asks = asks_for_gradients(sample), negated = has_negative_bit(sample);
        if (asks < 0 || negated < 0)
            return -1;
        if (torch_c.requires_grad != NULL && asks != torch_c.requires_grad(*(void **)handle_of(sample)))
            torch_c.requires_grad = NULL;
        if (torch_c.is_negated != NULL && negated != torch_c.is_negated(handle_of(sample)))
            torch_c.is_negated = NULL;
    }
#else
    (void)torch_cpu, (void)c10;
#endif
    return 0;
}

PyObject *reader_name(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return PyUnicode_FromString(handles_found ? "handles" : "dlpack");
}
