/* The eager state of a call, read through the C functions behind torch's own builtins and properties.
 *
 * Calling the C function of a builtin directly saves the interpreter's work around it: 15 ns in place of 30. Where a
 * builtin is of another kind, it is called as any object; the answer is the same.
 */
#include "hot.h"

#if defined(__linux__)
#include <dlfcn.h>
#define STATIC_TLS __attribute__((tls_model("initial-exec"))) /* one address, no call to find it */
#else
#define STATIC_TLS
#endif

PyTypeObject *tensor_type, *parameter_type, *dtype_type;
DLExchange *exchange;
long open_scopes;

typedef struct {
    PyObject *name;
    getter get; /* NULL: not a getset property */
    void *closure;
    PyCFunction method; /* NULL: not a method without arguments */
} Member;

static Question grad_enabled, function_modes, deterministic, inference, classify, dynamo_callback;
static Member member_requires_grad, member_is_leaf, member_is_inference, member_is_neg;
static PyObject *forward_ad, *forward_ad_level, *no_level;
static PyObject *layout_name, *strided, *is_meta_name, *is_nested_name, *is_quantized_name;

/* torch's thread-local dispatch keys: zero in plain eager code, other bits inside every mode, transform, autocast and
 * inference mode. What a pair of words stands for is asked of Python once and remembered. */
static void *keys_library;
static const char *keys_symbol = "_ZN3c104impl26raw_local_dispatch_key_setE";
static _Thread_local STATIC_TLS const uint64_t *thread_keys;

/* What the builtins behind two of the questions ask in turn; NULL where torch has no such symbol. */
static _Bool (*grad_mode)(void);
static int64_t (*function_mode_count)(void);

/* How many threads OpenMP takes for a parallel region of this thread: what torch.get_num_threads ends in, without its
 * check whether this thread was set up (1.5 ns in place of 8). */
static int (*thread_count)(void);
static struct {
    uint64_t included, excluded;
    int flags;
} known[8];
static int known_count, known_next;

void question_set(Question *question, PyObject *callable)
{
    Py_XSETREF(question->callable, Py_NewRef(callable));
    question->function = NULL;
    question->self = NULL;
    /* A function that pybind11 made has the same flags in some versions and crashes when called with NULL: its owner
     * is a capsule or record and no module, as that of torch's own builtins is. */
    if (PyCFunction_CheckExact(callable) && PyCFunction_GetFlags(callable) == METH_NOARGS) {
        PyObject *self = PyCFunction_GetSelf(callable);
        if (self == NULL || PyModule_Check(self)) {
            question->function = PyCFunction_GetFunction(callable);
            question->self = self;
        }
    }
}

static inline int truth(PyObject *answer)
{
    if (answer == NULL)
        return -1;
    int result = answer == Py_True ? 1 : answer == Py_False || answer == Py_None ? 0 : PyObject_IsTrue(answer);
    Py_DECREF(answer);
    return result;
}

static int member_set(Member *member, const char *name)
{
    PyObject *interned = PyUnicode_InternFromString(name);
    if (interned == NULL)
        return -1;
    Py_XSETREF(member->name, interned);
    member->get = NULL;
    member->method = NULL;
    PyObject *found = PyObject_GetAttr((PyObject *)tensor_type, interned);
    if (found == NULL)
        return -1;
    if (Py_IS_TYPE(found, &PyGetSetDescr_Type)) {
        member->get = ((PyGetSetDescrObject *)found)->d_getset->get;
        member->closure = ((PyGetSetDescrObject *)found)->d_getset->closure;
    } else if (Py_IS_TYPE(found, &PyMethodDescr_Type)) {
        PyMethodDef *method = ((PyMethodDescrObject *)found)->d_method;
        if (method->ml_flags == METH_NOARGS)
            member->method = method->ml_meth;
    }
    Py_DECREF(found);
    return 0;
}

static inline int member_ask(const Member *member, PyObject *tensor)
{
    if (member->get != NULL)
        return truth(member->get(tensor, member->closure));
    if (member->method != NULL)
        return truth(member->method(tensor, NULL));
    PyObject *value = PyObject_GetAttr(tensor, member->name);
    if (value != NULL && PyCallable_Check(value))
        Py_SETREF(value, PyObject_CallNoArgs(value));
    return truth(value);
}

int asks_for_gradients(PyObject *tensor) { return member_ask(&member_requires_grad, tensor); }
int is_leaf(PyObject *tensor) { return member_ask(&member_is_leaf, tensor); }
int is_inference(PyObject *tensor) { return member_ask(&member_is_inference, tensor); }
int has_negative_bit(PyObject *tensor) { return member_ask(&member_is_neg, tensor); }
int inference_enabled(void) { return truth(question_ask(&inference)); }

int dynamo_listens(void)
{
    if (dynamo_callback.callable == NULL)
        return 0;
    PyObject *callback = question_ask(&dynamo_callback);
    int listens = callback == NULL ? -1 : callback != Py_None && callback != Py_False;
    Py_XDECREF(callback);
    return listens;
}

PyObject *state_watch(PyObject *module, PyObject *callback)
{
    (void)module;
    question_set(&dynamo_callback, callback);
    Py_RETURN_NONE;
}

int is_plain(PyObject *tensor)
{
    PyObject *layout = PyObject_GetAttr(tensor, layout_name);
    if (layout == NULL)
        return -1;
    int dense = layout == strided;
    Py_DECREF(layout);
    PyObject *refused[] = {is_meta_name, is_nested_name, is_quantized_name};
    for (int i = 0; dense && i < COUNT(refused); i++) {
        int is = truth(PyObject_GetAttr(tensor, refused[i]));
        if (is < 0)
            return -1;
        dense = !is;
    }
    return dense;
}

static const uint64_t *read_thread_keys(void)
{
#if defined(__linux__)
    if (thread_keys == NULL && keys_library != NULL)
        thread_keys = dlsym(keys_library, keys_symbol);
#endif
    return thread_keys;
}

/* What Python says of the state: -1 a mode or transform listens, 0 nothing special, 1 autocast; -2 error. */
static int ask_python(void)
{
    PyObject *answer = question_ask(&classify);
    if (answer == NULL)
        return -2;
    long flags = PyLong_AsLong(answer);
    Py_DECREF(answer);
    return PyErr_Occurred() ? -2 : (int)flags;
}

static int dispatch_state(void)
{
    const uint64_t *keys = read_thread_keys();
    if (keys == NULL)
        return ask_python();
    for (int i = 0; i < known_count; i++)
        if (known[i].included == keys[0] && known[i].excluded == keys[1])
            return known[i].flags;
    uint64_t included = keys[0], excluded = keys[1];
    int flags = ask_python();
    if (flags >= 0) { /* modes and transforms are asked about each time: their calls are slow anyway */
        int place = known_next++ % COUNT(known);
        known[place].included = included;
        known[place].excluded = excluded;
        known[place].flags = flags;
        if (known_count < COUNT(known))
            known_count++;
    }
    return flags;
}

/* Whether no level of forward-mode AD is open. */
static int outside_forward_ad(void)
{
#if PY_VERSION_HEX < 0x030C0000
    /* A dictionary that has not changed needs no lookup; later versions hide what tells. */
    static uint64_t looked_at;
    uint64_t version = ((PyDictObject *)forward_ad)->ma_version_tag;
    if (version == looked_at)
        return 1;
#endif
    PyObject *level = PyDict_GetItemWithError(forward_ad, forward_ad_level);
    if (level != no_level) /* -1 is one object in every CPython; anything else is looked at by Python */
        return level == NULL && PyErr_Occurred() ? -1 : 0;
#if PY_VERSION_HEX < 0x030C0000
    looked_at = version;
#endif
    return 1;
}

int state_read(EagerState *state)
{
    int flags = dispatch_state();
    if (flags < 0)
        return flags == -1 ? 0 : -1;
    state->autocast = flags;
    int modes = function_mode_count != NULL ? function_mode_count() != 0 : truth(question_ask(&function_modes));
    if (modes)
        return modes < 0 ? -1 : 0;
    int outside = outside_forward_ad();
    if (outside <= 0)
        return outside;
    state->grad = grad_mode != NULL ? grad_mode() : truth(question_ask(&grad_enabled));
    state->deterministic = truth(question_ask(&deterministic));
    state->threads = thread_count != NULL ? thread_count() : 0;
    if (state->grad < 0 || state->deterministic < 0)
        return -1;
    return 1;
}

/* The number of open policy scopes, told by what opens and closes one. */
PyObject *state_set_scopes(PyObject *module, PyObject *count)
{
    (void)module;
    long scopes = PyLong_AsLong(count);
    if (scopes == -1 && PyErr_Occurred())
        return NULL;
    open_scopes = scopes;
    Py_RETURN_NONE;
}

/* What is read without asking Python: two words of keys, grad mode, the numbers of function modes and of threads; None
 * where not. */
PyObject *state_words(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    const uint64_t *keys = read_thread_keys();
    PyObject *words = keys == NULL ? Py_NewRef(Py_None)
                                   : Py_BuildValue("(KK)", (unsigned long long)keys[0], (unsigned long long)keys[1]);
    PyObject *grad = grad_mode == NULL ? Py_NewRef(Py_None) : PyBool_FromLong(grad_mode());
    PyObject *modes = function_mode_count == NULL ? Py_NewRef(Py_None) : PyLong_FromLongLong(function_mode_count());
    PyObject *threads = thread_count == NULL ? Py_NewRef(Py_None) : PyLong_FromLong(thread_count());
    return Py_BuildValue("(NNNN)", words, grad, modes, threads);
}

/* A required entry of the sources, borrowed. */
static PyObject *source(PyObject *sources, const char *name)
{
    PyObject *found = PyDict_GetItemString(sources, name);
    if (found == NULL && !PyErr_Occurred())
        PyErr_Format(PyExc_KeyError, "setup: wanted %s, got nothing", name);
    return found;
}

static int set_object(PyObject **place, PyObject *sources, const char *name)
{
    PyObject *found = source(sources, name);
    if (found == NULL)
        return -1;
    Py_XSETREF(*place, Py_NewRef(found));
    return 0;
}

static int set_question(Question *question, PyObject *sources, const char *name)
{
    PyObject *found = source(sources, name);
    if (found == NULL)
        return -1;
    question_set(question, found);
    return 0;
}

static int set_name(PyObject **place, const char *name)
{
    PyObject *interned = PyUnicode_InternFromString(name);
    if (interned == NULL)
        return -1;
    Py_XSETREF(*place, interned);
    return 0;
}

#if defined(__linux__)
/* A library that torch has loaded, NULL where there is none; nothing is loaded here. -1 in `fails` for an error. */
static void *library(PyObject *sources, const char *name, int *fails)
{
    PyObject *path = source(sources, name);
    const char *text = path == NULL || path == Py_None ? NULL : PyUnicode_AsUTF8(path);
    if (text == NULL) {
        *fails |= PyErr_Occurred() != NULL;
        return NULL;
    }
    return dlopen(text, RTLD_LAZY | RTLD_NOLOAD);
}
#endif

static int set_libraries(PyObject *sources)
{
    int fails = 0;
    PyObject *samples = source(sources, "samples");
    if (samples == NULL)
        return -1;
    known_count = known_next = 0;
    thread_keys = NULL;
#if defined(__linux__)
    keys_library = library(sources, "c10", &fails);
    grad_mode = keys_library == NULL ? NULL : (_Bool(*)(void))dlsym(keys_library, "_ZN3c108GradMode10is_enabledEv");
    void *cpu = library(sources, "torch_cpu", &fails);
    if (reader_setup(cpu, keys_library, samples) < 0)
        return -1;
    thread_count = cpu == NULL ? NULL : (int (*)(void))dlsym(cpu, "omp_get_max_threads");
    function_mode_count =
        cpu == NULL ? NULL : (int64_t(*)(void))dlsym(cpu, "_ZN2at4impl22PythonTorchFunctionTLS9stack_lenEv");
#else
    fails = reader_setup(NULL, NULL, samples) < 0;
#endif
    return fails ? -1 : 0;
}

int state_setup(PyObject *sources)
{
    PyObject *capsule = source(sources, "exchange");
    if (capsule == NULL)
        return -1;
    DLExchange *found = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (found == NULL)
        return -1;
    if (found->major != 1 || found->describe == NULL) {
        PyErr_Format(PyExc_RuntimeError, "setup: wanted version 1 of the DLPack exchange API, got %u", found->major);
        return -1;
    }
    PyObject *tensor = source(sources, "tensor"), *parameter = source(sources, "parameter"), *dtype = source(sources, "dtype");
    if (tensor == NULL || parameter == NULL)
        return -1;
    if (!PyType_Check(tensor) || !PyType_Check(parameter)) {
        PyErr_SetString(PyExc_TypeError, "setup: wanted types");
        return -1;
    }
    exchange = found;
    tensor_type = (PyTypeObject *)Py_NewRef(tensor);
    parameter_type = (PyTypeObject *)Py_NewRef(parameter);
    dtype_type = (PyTypeObject *)Py_NewRef(dtype);
    Py_XSETREF(no_level, PyLong_FromLong(-1));
    if (no_level == NULL || set_question(&grad_enabled, sources, "grad_enabled") < 0 ||
        set_question(&function_modes, sources, "function_modes") < 0 ||
        set_question(&deterministic, sources, "deterministic") < 0 ||
        set_question(&inference, sources, "inference") < 0 || set_question(&classify, sources, "classify") < 0 ||
        set_object(&forward_ad, sources, "forward_ad") < 0 ||
        set_object(&strided, sources, "strided") < 0)
        return -1;
    if (!PyDict_Check(forward_ad)) {
        PyErr_SetString(PyExc_TypeError, "setup: wanted the dictionary of forward_ad");
        return -1;
    }
    return set_name(&forward_ad_level, "_current_level") < 0 ||
                   set_name(&layout_name, "layout") < 0 || set_name(&is_meta_name, "is_meta") < 0 ||
                   set_name(&is_nested_name, "is_nested") < 0 || set_name(&is_quantized_name, "is_quantized") < 0 ||
                   member_set(&member_requires_grad, "requires_grad") < 0 ||
                   member_set(&member_is_leaf, "is_leaf") < 0 ||
                   member_set(&member_is_inference, "is_inference") < 0 || member_set(&member_is_neg, "is_neg") < 0 ||
                   set_libraries(sources) < 0
               ? -1
               : 0;
}
