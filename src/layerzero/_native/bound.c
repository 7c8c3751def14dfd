/* Kernels with their constants in place, and callables for static code: bound once, guarded, never looked up. */
#include "hot.h"

#include <stddef.h>
#include <structmember.h>

/* Direct: what a plan runs where it does nothing but call its kernel. Spares the plan's own Python frame. */

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *target, *keywords; /* keywords: of the last arguments, NULL where there are none */
    int wanted;                  /* values of the function's parameters, by position */
    int count;                   /* arguments of the kernel */
    int place[MAX_PARAMETERS];   /* which value, -1 for a constant */
    PyObject *constant[MAX_PARAMETERS];
} Direct;

static inline PyObject *direct_run(Direct *self, PyObject *const *values)
{
    PyObject *arguments[MAX_PARAMETERS + 1]; /* one spare in front: bound methods put themselves there */
    for (int i = 0; i < self->count; i++)
        arguments[i + 1] = self->place[i] < 0 ? self->constant[i] : values[self->place[i]];
    Py_ssize_t named = self->keywords == NULL ? 0 : PyTuple_GET_SIZE(self->keywords);
    return PyObject_Vectorcall(self->target, arguments + 1,
                               (size_t)(self->count - named) | PY_VECTORCALL_ARGUMENTS_OFFSET, self->keywords);
}

static PyObject *direct_call(PyObject *direct, PyObject *const *values, size_t flags, PyObject *names)
{
    Direct *self = (Direct *)direct;
    if (PyVectorcall_NARGS(flags) != self->wanted || (names != NULL && PyTuple_GET_SIZE(names) > 0))
        return PyErr_Format(PyExc_TypeError, "wanted %d values by position", self->wanted);
    return direct_run(self, values);
}

PyObject *run_plan(PyObject *run, PyObject *const *values, int count)
{
    if (Py_IS_TYPE(run, &DirectType) && ((Direct *)run)->wanted == count)
        return direct_run((Direct *)run, values);
    return PyObject_Vectorcall(run, values, (size_t)count, NULL);
}

static PyObject *direct_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *target, *places, *constants, *keywords;
    int wanted;
    if ((kwargs != NULL && PyDict_GET_SIZE(kwargs) > 0) ||
        !PyArg_ParseTuple(args, "OiO!O!O!", &target, &wanted, &PyTuple_Type, &places, &PyTuple_Type, &constants,
                          &PyTuple_Type, &keywords))
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "wanted arguments by position");
    Py_ssize_t count = PyTuple_GET_SIZE(places);
    if (count > MAX_PARAMETERS || PyTuple_GET_SIZE(constants) != count || PyTuple_GET_SIZE(keywords) > count)
        return PyErr_Format(PyExc_ValueError, "wanted a place and a constant for each of at most %d arguments",
                            MAX_PARAMETERS);
    Direct *self = (Direct *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->vectorcall = direct_call;
    self->target = Py_NewRef(target);
    self->keywords = PyTuple_GET_SIZE(keywords) > 0 ? Py_NewRef(keywords) : NULL;
    self->wanted = wanted;
    self->count = (int)count;
    for (int i = 0; i < self->count; i++) {
        long place = PyLong_AsLong(PyTuple_GET_ITEM(places, i));
        if (place >= wanted && !PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "wanted the number of a value");
        self->place[i] = (int)place;
        self->constant[i] = Py_NewRef(PyTuple_GET_ITEM(constants, i));
    }
    if (PyErr_Occurred())
        Py_CLEAR(self);
    return (PyObject *)self;
}

static int direct_traverse(PyObject *direct, visitproc visit, void *arg)
{
    Direct *self = (Direct *)direct;
    Py_VISIT(self->target);
    for (int i = 0; i < self->count; i++)
        Py_VISIT(self->constant[i]);
    return 0;
}

static void direct_dealloc(PyObject *direct)
{
    Direct *self = (Direct *)direct;
    PyObject_GC_UnTrack(direct);
    Py_XDECREF(self->target);
    Py_XDECREF(self->keywords);
    for (int i = 0; i < self->count; i++)
        Py_XDECREF(self->constant[i]);
    Py_TYPE(direct)->tp_free(direct);
}

PyTypeObject DirectType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "layerzero._native.hot.Direct",
    .tp_doc = "A kernel with its constants in place.",
    .tp_basicsize = sizeof(Direct),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_new = direct_new,
    .tp_dealloc = direct_dealloc,
    .tp_traverse = direct_traverse, /* no tp_clear: it is never changed, and what it refers to can be */
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Direct, vectorcall),
};

/* Bound: the callable that layerzero.inspection.bind hands out. Whatever is no plain hit goes to its Python owner. */

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *weak;
    Function *function;
    PyObject *owner, *otherwise, *failed;
    PyObject *index, *plan, *run; /* NULL until a plan is in force; `index` is that of its epoch */
    int guarded, refuses_negated;
    int passed;                 /* how many values a call brings */
    int place[MAX_PARAMETERS];  /* which parameters they are */
    PyObject *value[MAX_PARAMETERS]; /* those that are fixed; NULL for the others */
    int word_count;
    uint64_t words[MAX_EXACT_WORDS]; /* the exact key of the calls that it takes */
} Bound;

static PyObject *bound_otherwise(Bound *self, PyObject *const *args, size_t flags, PyObject *names)
{
    if (self->otherwise == NULL)
        return PyErr_Format(PyExc_RuntimeError, "this callable was collected");
    return PyObject_Vectorcall(self->otherwise, args, flags, names);
}

static PyObject *bound_failed(Bound *self, PyObject *plan, PyObject *const *values)
{
    return self->failed == NULL ? NULL : answer_failure(self->failed, plan, values, self->function->count);
}

static PyObject *bound_call(PyObject *bound, PyObject *const *args, size_t flags, PyObject *names)
{
    Bound *self = (Bound *)bound;
    PyObject *values[MAX_PARAMETERS];
    if (self->run == NULL || PyVectorcall_NARGS(flags) != self->passed ||
        (names != NULL && PyTuple_GET_SIZE(names) > 0))
        return bound_otherwise(self, args, flags, names);
    memcpy(values, self->value, (size_t)self->function->count * sizeof values[0]);
    for (int i = 0; i < self->passed; i++)
        values[self->place[i]] = args[i];
    if (self->guarded) {
        Key key;
        int listens = self->function->unwatched == NULL ? 0 : dynamo_listens();
        int made = listens ? -listens : key_make(self->function, values, &key);
        if (listens < 0 || (listens == 0 && made < 0))
            return NULL;
        if (listens || made == 0 || open_scopes || self->index != self->function->index ||
            key.exact_count != self->word_count ||
            memcmp(key.exact, self->words, (size_t)key.exact_count * sizeof key.exact[0]) != 0)
            return bound_otherwise(self, args, flags, names);
        for (int i = 0; self->refuses_negated && i < self->function->tensor_count; i++) {
            PyObject *value = values[self->function->tensor_parameter[i]];
            int negated = value == Py_None ? 0 : is_negated(value);
            if (negated)
                return negated < 0 ? NULL : bound_otherwise(self, args, flags, names);
        }
    }
    /* Both may be replaced while the plan runs. */
    PyObject *plan = Py_NewRef(self->plan), *run = Py_NewRef(self->run);
    PyObject *result = run_plan(run, values, self->function->count);
    if (result == NULL)
        result = bound_failed(self, plan, values);
    Py_DECREF(run);
    Py_DECREF(plan);
    return result;
}

/* install(index, plan, run, negated): run this plan until the epoch that `index` stands for ends. */
static PyObject *bound_install(PyObject *bound, PyObject *args)
{
    Bound *self = (Bound *)bound;
    PyObject *index, *plan, *run;
    int negated;
    if (!PyArg_ParseTuple(args, "O!OOp", &IndexType, &index, &plan, &run, &negated))
        return NULL;
    PyObject *before[] = {self->index, self->plan, self->run};
    self->index = Py_NewRef(index);
    self->plan = Py_NewRef(plan);
    self->run = Py_NewRef(run);
    self->refuses_negated = !negated;
    for (int i = 0; i < COUNT(before); i++)
        Py_XDECREF(before[i]);
    Py_RETURN_NONE;
}

static PyObject *bound_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *words[] = {"function", "owner", "otherwise", "failed", "exact", "values", "passed", "guarded", NULL};
    PyObject *function, *owner, *otherwise, *failed, *exact, *values, *passed;
    int guarded;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "$O!OOOSO!O!p", words, &FunctionType, &function, &owner, &otherwise,
                                     &failed, &exact, &PyTuple_Type, &values, &PyTuple_Type, &passed, &guarded))
        return NULL;
    Py_ssize_t size = PyBytes_GET_SIZE(exact), count = PyTuple_GET_SIZE(values);
    if (count != ((Function *)function)->count || PyTuple_GET_SIZE(passed) > count ||
        size > (Py_ssize_t)(MAX_EXACT_WORDS * sizeof(uint64_t)))
        return PyErr_Format(PyExc_ValueError, "wanted a value for each parameter, and a key of the function");
    Bound *self = (Bound *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->vectorcall = bound_call;
    self->function = (Function *)Py_NewRef(function);
    self->owner = Py_NewRef(owner);
    self->otherwise = Py_NewRef(otherwise);
    self->failed = Py_NewRef(failed);
    self->guarded = guarded;
    self->word_count = (int)(size / (Py_ssize_t)sizeof(uint64_t));
    memcpy(self->words, PyBytes_AS_STRING(exact), (size_t)size);
    self->passed = (int)PyTuple_GET_SIZE(passed);
    for (int i = 0; i < count; i++)
        self->value[i] = Py_NewRef(PyTuple_GET_ITEM(values, i));
    for (int i = 0; i < self->passed; i++) {
        long place = PyLong_AsLong(PyTuple_GET_ITEM(passed, i));
        if (!PyErr_Occurred() && (place < 0 || place >= count))
            PyErr_SetString(PyExc_ValueError, "wanted the number of a parameter");
        self->place[i] = (int)place;
    }
    if (PyErr_Occurred())
        Py_CLEAR(self);
    return (PyObject *)self;
}

/* What it does not have, its owner has: plan, report, repr. */
static PyObject *bound_getattr(PyObject *bound, PyObject *name)
{
    PyObject *found = PyObject_GenericGetAttr(bound, name), *owner = ((Bound *)bound)->owner;
    if (found != NULL || owner == NULL || !PyErr_ExceptionMatches(PyExc_AttributeError))
        return found;
    PyErr_Clear();
    return PyObject_GetAttr(owner, name);
}

static PyObject *bound_repr(PyObject *bound)
{
    PyObject *owner = ((Bound *)bound)->owner;
    return owner == NULL ? PyUnicode_FromString("<collected>") : PyObject_Repr(owner);
}

static int bound_traverse(PyObject *bound, visitproc visit, void *arg)
{
    Bound *self = (Bound *)bound;
    Py_VISIT(self->owner);
    Py_VISIT(self->otherwise);
    Py_VISIT(self->failed);
    Py_VISIT(self->plan);
    Py_VISIT(self->run);
    Py_VISIT(self->function);
    for (int i = 0; i < MAX_PARAMETERS; i++)
        Py_VISIT(self->value[i]);
    return 0;
}

static int bound_drop(PyObject *bound)
{
    Bound *self = (Bound *)bound;
    Py_CLEAR(self->run); /* first: without it nothing else is used */
    Py_CLEAR(self->owner);
    Py_CLEAR(self->otherwise);
    Py_CLEAR(self->failed);
    Py_CLEAR(self->plan);
    return 0;
}

static void bound_dealloc(PyObject *bound)
{
    Bound *self = (Bound *)bound;
    PyObject_GC_UnTrack(bound);
    if (self->weak != NULL)
        PyObject_ClearWeakRefs(bound);
    bound_drop(bound);
    Py_XDECREF(self->index);
    Py_XDECREF(self->function);
    for (int i = 0; i < MAX_PARAMETERS; i++)
        Py_XDECREF(self->value[i]);
    Py_TYPE(bound)->tp_free(bound);
}

static PyMethodDef bound_methods[] = {
    {"install", bound_install, METH_VARARGS, "install(index, plan, run, negated)"},
    {NULL},
};

PyTypeObject BoundType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "layerzero._native.hot.Bound",
    .tp_doc = "A function bound to its plan for one kind of call.",
    .tp_basicsize = sizeof(Bound),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_new = bound_new,
    .tp_dealloc = bound_dealloc,
    .tp_traverse = bound_traverse,
    .tp_clear = bound_drop,
    .tp_methods = bound_methods,
    .tp_getattro = bound_getattr,
    .tp_repr = bound_repr,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Bound, vectorcall),
    .tp_weaklistoffset = offsetof(Bound, weak),
};
