/* Declaring a function, and the module. */
#include "hot.h"

/* Declaring a function: tuples that layerzero.engine.accelerator writes from the schema. */

static int set_parameter(Function *self, PyObject *described, int place)
{
    Parameter *parameter = &self->parameters[place];
    PyObject *name, *default_value, *made_of, *kind_for, *types;
    int kind, required;
    if (!PyArg_ParseTuple(described, "UiOpO!OO!dd", &name, &kind, &default_value, &required, &PyTuple_Type, &made_of,
                          &kind_for, &PyTuple_Type, &types, &parameter->least, &parameter->most))
        return -1;
    parameter->kind_for = kind_for == Py_None ? NULL : Py_NewRef(kind_for);
    parameter->types = Py_NewRef(types);
    Py_INCREF(name);
    PyUnicode_InternInPlace(&name);
    parameter->name = name;
    parameter->kind = (enum Kind)kind;
    parameter->default_value = required ? NULL : Py_NewRef(default_value);
    Py_ssize_t count = PyTuple_GET_SIZE(made_of);
    if (kind < VALUE || kind > PASSED || count >= MAX_TENSORS) {
        PyErr_Format(PyExc_ValueError, "wanted a kind of parameter, got %R", described);
        return -1;
    }
    for (Py_ssize_t i = 0; i <= count; i++)
        parameter->made_of[i] = i < count ? (int)PyLong_AsLong(PyTuple_GET_ITEM(made_of, i)) : -1;
    self->has_given_as |= kind == PASSED && count > 0;
    if (kind == TENSOR || kind == OPTIONAL_TENSOR) {
        if (self->tensor_count == MAX_TENSORS) {
            PyErr_Format(PyExc_ValueError, "wanted at most %d tensors", MAX_TENSORS);
            return -1;
        }
        parameter->tensor = self->tensor_count;
        self->tensor_parameter[self->tensor_count++] = place;
    }
    return PyErr_Occurred() ? -1 : 0;
}

static int set_mutated(Function *self, PyObject *mutated)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(mutated); i++) {
        Mutated *each = &self->mutated[self->mutated_count];
        if (self->mutated_count++ == MAX_TENSORS ||
            !PyArg_ParseTuple(PyTuple_GET_ITEM(mutated, i), "iII", &each->tensor, &each->apart, &each->not_start))
            return -1;
        if (each->tensor < 0 || each->tensor >= self->tensor_count) {
            PyErr_SetString(PyExc_ValueError, "wanted the number of a tensor that is written into");
            return -1;
        }
    }
    return 0;
}

static PyObject *function_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *words[] = {"name",   "doc",    "parameters", "positional", "mutated", "asked",
                            "python", "miss",   "failed",     "scoped",     NULL};
    PyObject *name, *doc, *parameters, *mutated, *asked, *python, *miss, *failed, *scoped;
    int positional;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "$UUO!iO!O!OOOO", words, &name, &doc, &PyTuple_Type, &parameters,
                                     &positional, &PyTuple_Type, &mutated, &PyTuple_Type, &asked, &python, &miss, &failed,
                                     &scoped))
        return NULL;
    Py_ssize_t count = PyTuple_GET_SIZE(parameters);
    if (count > MAX_PARAMETERS || positional < 0 || positional > count)
        return PyErr_Format(PyExc_ValueError, "wanted at most %d parameters, got %zd", MAX_PARAMETERS, count);
    Function *self = (Function *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->count = (int)count;
    self->positional = positional;
    self->builtin_name = Py_NewRef(name);
    self->builtin_doc = Py_NewRef(doc);
    self->python = Py_NewRef(python);
    self->miss = Py_NewRef(miss);
    self->failed = Py_NewRef(failed);
    self->scoped = Py_NewRef(scoped);
    self->strings = PyDict_New();
    self->index = PyObject_CallNoArgs((PyObject *)&IndexType);
    self->method = (PyMethodDef){PyUnicode_AsUTF8(name), (PyCFunction)(void (*)(void))call,
                                 METH_FASTCALL | METH_KEYWORDS, PyUnicode_AsUTF8(doc)};
    int fails = self->strings == NULL || self->index == NULL || self->method.ml_name == NULL;
    for (int i = 0; i < count && !fails; i++)
        fails = set_parameter(self, PyTuple_GET_ITEM(parameters, i), i) < 0;
    if (!fails && (self->tensor_count == 0 || count - self->tensor_count > 16)) {
        PyErr_SetString(PyExc_ValueError, "wanted a tensor and at most 16 other parameters");
        fails = 1;
    }
    if (fails || set_mutated(self, mutated) < 0 || asked_set(self, asked) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static PyObject *function_builtin(PyObject *function, PyObject *unused)
{
    (void)unused;
    PyObject *module = PyUnicode_InternFromString("layerzero");
    PyObject *builtin = module == NULL ? NULL : PyCFunction_NewEx(&((Function *)function)->method, function, module);
    Py_XDECREF(module);
    return builtin;
}

static PyObject *function_publish(PyObject *function, PyObject *index)
{
    if (!Py_IS_TYPE(index, &IndexType))
        return PyErr_Format(PyExc_TypeError, "wanted an Index, got %s", Py_TYPE(index)->tp_name);
    Py_XSETREF(((Function *)function)->index, Py_NewRef(index));
    Py_RETURN_NONE;
}

static PyObject *function_unwatched(PyObject *function, PyObject *callable)
{
    Py_XSETREF(((Function *)function)->unwatched, Py_NewRef(callable));
    Py_RETURN_NONE;
}

/* put(index, exact, coarse, plan, run, negated, conditions): conditions None keeps the plan for the exact key alone. */
static PyObject *function_put(PyObject *function, PyObject *args)
{
    PyObject *index, *exact, *coarse, *plan, *run, *conditions;
    int negated;
    if (!PyArg_ParseTuple(args, "O!SSOOpO", &IndexType, &index, &exact, &coarse, &plan, &run, &negated, &conditions))
        return NULL;
    const uint64_t *words = (const uint64_t *)PyBytes_AS_STRING(exact);
    int count = (int)(PyBytes_GET_SIZE(exact) / (Py_ssize_t)sizeof(uint64_t));
    int64_t *program = NULL;
    if (conditions != Py_None) {
        Key key;
        int at = key_header((Function *)function);
        for (int i = 0; i < ((Function *)function)->tensor_count; i++) { /* find each tensor's words again */
            if (at >= count) {
                PyErr_SetString(PyExc_ValueError, "wanted a key of this function");
                return NULL;
            }
            key.start[i] = at;
            key.ndim[i] = words[at] ? (int)(words[at] >> 8 & 0xFF) : -1;
            at += key.ndim[i] < 0 ? 1 : 1 + 2 * key.ndim[i];
        }
        if ((program = conditions_parse(conditions, &key)) == NULL)
            return NULL;
        words = (const uint64_t *)PyBytes_AS_STRING(coarse);
        count = (int)(PyBytes_GET_SIZE(coarse) / (Py_ssize_t)sizeof(uint64_t));
    }
    if (index_put(index, words, count, plan, run, negated, program) < 0) {
        PyMem_Free(program);
        return NULL;
    }
    Py_RETURN_NONE;
}

/* key(values): the exact and the coarse key of a call, None where it makes none here. */
static PyObject *function_key(PyObject *function, PyObject *values)
{
    Function *self = (Function *)function;
    Key key;
    if (!PyTuple_Check(values) || PyTuple_GET_SIZE(values) != self->count)
        return PyErr_Format(PyExc_TypeError, "wanted a tuple of %d values", self->count);
    int made = key_make(self, ((PyTupleObject *)values)->ob_item, &key);
    if (made <= 0)
        return made < 0 ? NULL : Py_NewRef(Py_None);
    key_make_coarse(self, &key);
    return Py_BuildValue("(y#y#)", (char *)key.exact, (Py_ssize_t)(key.exact_count * sizeof(uint64_t)),
                         (char *)key.coarse, (Py_ssize_t)(key.coarse_count * sizeof(uint64_t)));
}

static int function_traverse(PyObject *function, visitproc visit, void *arg)
{
    Function *self = (Function *)function;
    Py_VISIT(self->python);
    Py_VISIT(self->miss);
    Py_VISIT(self->failed);
    Py_VISIT(self->scoped);
    Py_VISIT(self->unwatched);
    Py_VISIT(self->index);
    return 0;
}

static int function_drop(PyObject *function)
{
    Function *self = (Function *)function;
    Py_CLEAR(self->python);
    Py_CLEAR(self->miss);
    Py_CLEAR(self->failed);
    Py_CLEAR(self->scoped);
    Py_CLEAR(self->unwatched);
    return 0;
}

static void function_dealloc(PyObject *function)
{
    Function *self = (Function *)function;
    PyObject_GC_UnTrack(function);
    function_drop(function);
    Py_XDECREF(self->index);
    Py_XDECREF(self->strings);
    Py_XDECREF(self->builtin_name);
    Py_XDECREF(self->builtin_doc);
    asked_drop(self);
    for (int i = 0; i < self->count; i++) {
        Py_XDECREF(self->seen[i]);
        Py_XDECREF(self->parameters[i].name);
        Py_XDECREF(self->parameters[i].default_value);
        Py_XDECREF(self->parameters[i].kind_for);
        Py_XDECREF(self->parameters[i].types);
    }
    Py_TYPE(function)->tp_free(function);
}

static PyMethodDef function_methods[] = {
    {"builtin", function_builtin, METH_NOARGS, "The callable that users get."},
    {"publish", function_publish, METH_O, "Make this the index of the process-wide policy's table."},
    {"unwatched", function_unwatched, METH_O, "What to call instead while Dynamo listens."},
    {"key", function_key, METH_O, "The exact and the coarse key of a call's values, None where it makes none here."},
    {"put", function_put, METH_VARARGS, "put(index, exact, coarse, plan, run, negated, conditions)"},
    {NULL},
};

PyTypeObject FunctionType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "layerzero._native.hot.Function",
    .tp_doc = "The hit path of one public function.",
    .tp_basicsize = sizeof(Function),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
    .tp_new = function_new,
    .tp_dealloc = function_dealloc,
    .tp_traverse = function_traverse,
    .tp_clear = function_drop,
    .tp_methods = function_methods,
};

static PyObject *setup(PyObject *module, PyObject *args, PyObject *sources)
{
    (void)module;
    if (PyTuple_GET_SIZE(args) != 0 || sources == NULL) {
        PyErr_SetString(PyExc_TypeError, "setup: wanted torch's state by keyword");
        return NULL;
    }
    PyObject *used = PyDict_GetItemString(sources, "used");
    if (used == NULL || index_setup(used) < 0 || state_setup(sources) < 0)
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_KeyError, "setup: wanted used, got nothing");
    Py_RETURN_NONE;
}

static PyMethodDef module_methods[] = {
    {"setup", (PyCFunction)(void (*)(void))setup, METH_VARARGS | METH_KEYWORDS, "Say where torch's state is read."},
    {"watch", state_watch, METH_O, "Say what tells whether Dynamo listens."},
    {"set_scopes", state_set_scopes, METH_O, "Say how many policy scopes are open."},
    {"reader", reader_name, METH_NOARGS, "What tells about tensors: torch's C functions by handle, or DLPack."},
    {"distinct", indices_distinct, METH_O, "distinct(tensor): whether no number from 0 on comes twice in a row"},
    {"within", indices_within, METH_VARARGS, "within(tensor, low, high): whether all are from low to below high"},
    {"firsts_within", indices_firsts_within, METH_VARARGS,
     "firsts_within(table, counts, per, high): the same for the first counts / per of each row, from 0"},
    {"slots", slots_fill, METH_VARARGS,
     "slots(tables, lens, starts, tokens, page_size, pages, out): how many tokens are lost; -1 for starts that are none"},
    {"version", stamp_version, METH_O, "version(cls): changes with anything of a class or its bases; 0 for none"},
    {"places", (PyCFunction)(void (*)(void))stamp_places, METH_FASTCALL, "places(dict, items): for unchanged"},
    {"unchanged", (PyCFunction)(void (*)(void))stamp_unchanged, METH_FASTCALL,
     "unchanged(objects, classes, dicts, keys, lists, names): whether all are what they were"},
    {"stands", (PyCFunction)(void (*)(void))stamp_stands, METH_FASTCALL, "stands(address, places, words)"},
    {"checksum", (PyCFunction)(void (*)(void))stamp_checksum, METH_FASTCALL, "checksum(address, bytes): of memory"},
#ifdef __SSE2__
    {"stream", (PyCFunction)(void (*)(void))stamp_stream, METH_FASTCALL, "stream(to, address, bytes): copy past caches"},
#endif
    {"state", state_words, METH_NOARGS, "Dispatch keys, grad mode, function modes; None where not read."},
    {NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "layerzero._native.hot", .m_doc = "The hit path in C.", .m_size = -1,
    .m_methods = module_methods,
};

PyMODINIT_FUNC PyInit_hot(void)
{
    PyTypeObject *types[] = {&IndexType, &FunctionType, &DirectType, &BoundType};
    PyObject *module = PyModule_Create(&definition);
    for (int i = 0; module != NULL && i < COUNT(types); i++)
        if (PyModule_AddType(module, types[i]) < 0) /* readies it, too */
            Py_CLEAR(module);
    if (module != NULL && PyModule_AddIntConstant(module, "INTERFACE", INTERFACE) < 0)
        Py_CLEAR(module);
    return module;
}
