/* The callable of a function: bind the arguments, make the key, find the plan, run it: the way of one hit from end to
 * end. */
#include "hot.h"

static int bind(Function *self, PyObject *const *args, Py_ssize_t given, PyObject *names, PyObject **values)
{
    if (given > self->positional)
        return 0;
    for (int i = 0; i < self->count; i++)
        values[i] = i < given ? args[i] : NULL;
    Py_ssize_t named = names == NULL ? 0 : PyTuple_GET_SIZE(names);
    int next = (int)given; /* names come in the signature's order, more often than not */
    for (Py_ssize_t each = 0; each < named; each++) {
        PyObject *name = PyTuple_GET_ITEM(names, each); /* the compiler interns what callers write */
        int place = -1;
        for (int i = next; i < self->count && place < 0; i++)
            if (self->parameters[i].name == name)
                place = i;
        for (int i = 0; i < next && i < self->count && place < 0; i++)
            if (self->parameters[i].name == name)
                place = i;
        if (place < 0 || values[place] != NULL)
            return 0;
        values[place] = args[given + each];
        next = place + 1;
    }
    for (int i = 0; i < self->count; i++)
        if (values[i] == NULL && (values[i] = self->parameters[i].default_value) == NULL)
            return 0;
    for (int i = 0; self->has_given_as && i < self->count; i++) { /* a tensor is an argument of its own from here on */
        int tensor = self->parameters[i].kind == PASSED ? self->parameters[i].made_of[0] : -1;
        if (tensor < 0 || !Py_IS_TYPE(values[i], tensor_type))
            continue;
        values[tensor] = values[i];
        values[i] = Py_None;
    }
    return 1;
}

/* Call one of the slower ways with up to two leading arguments. */
static PyObject *hand_over(PyObject *way, PyObject *first, PyObject *second, PyObject *const *values, int count)
{
    PyObject *arguments[MAX_PARAMETERS + 2];
    size_t leading = 0;
    if (way == NULL)
        return PyErr_Format(PyExc_RuntimeError, "this function was collected");
    arguments[leading++] = first;
    if (second != NULL)
        arguments[leading++] = second;
    memcpy(arguments + leading, values, (size_t)count * sizeof values[0]);
    return PyObject_Vectorcall(way, arguments, leading + (size_t)count, NULL);
}

PyObject *answer_failure(PyObject *way, PyObject *plan, PyObject *const *values, int count)
{
    PyObject *type, *error, *traceback;
    if (!PyErr_ExceptionMatches(PyExc_Exception))
        return NULL; /* an interrupt or an exit is no failure of the plan's */
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback != NULL)
        PyException_SetTraceback(error, traceback);
    PyObject *outer = PyErr_GetHandledException();
    PyErr_SetHandledException(error);
    PyObject *result = hand_over(way, plan, error, values, count);
    PyErr_SetHandledException(outer);
    Py_XDECREF(outer);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
    return result;
}

static int reads_negated(Function *self, PyObject *const *values)
{
    for (int i = 0; i < self->tensor_count; i++) {
        PyObject *value = values[self->tensor_parameter[i]];
        int negated = value == Py_None ? 0 : is_negated(value);
        if (negated)
            return negated;
    }
    return 0;
}

static PyObject *choose(Function *self, Key *key, PyObject *const *values)
{
    key_make_coarse(self, key);
    PyObject *exact = PyBytes_FromStringAndSize((char *)key->exact, (Py_ssize_t)(key->exact_count * sizeof(uint64_t)));
    PyObject *coarse =
        PyBytes_FromStringAndSize((char *)key->coarse, (Py_ssize_t)(key->coarse_count * sizeof(uint64_t)));
    PyObject *result =
        exact == NULL || coarse == NULL ? NULL : hand_over(self->miss, exact, coarse, values, self->count);
    Py_XDECREF(exact);
    Py_XDECREF(coarse);
    return result;
}

static PyObject *slowly(Function *self, PyObject *const *args, Py_ssize_t given, PyObject *names)
{
    if (self->python == NULL)
        return PyErr_Format(PyExc_RuntimeError, "this function was collected");
    return PyObject_Vectorcall(self->python, args, (size_t)given, names);
}

PyObject *call(PyObject *function, PyObject *const *args, Py_ssize_t given, PyObject *names)
{
    Function *self = (Function *)function;
    PyObject *values[MAX_PARAMETERS];
    Key key;
    Found found;
    int listens = self->unwatched == NULL ? 0 : dynamo_listens();
    if (listens)
        return listens < 0 ? NULL : PyObject_Vectorcall(self->unwatched, args, (size_t)given, names);
    int made = bind(self, args, given, names, values);
    if (made > 0)
        made = key_make(self, values, &key);
    if (made < 0)
        return NULL;
    if (made == 0)
        return slowly(self, args, given, names);
    /* The table may be replaced while its plan runs, so both are held. */
    PyObject *index = open_scopes ? PyObject_CallNoArgs(self->scoped) : Py_NewRef(self->index);
    if (index == NULL)
        return NULL;
    if (!Py_IS_TYPE(index, &IndexType)) {
        Py_DECREF(index);
        PyErr_SetString(PyExc_TypeError, "wanted the index of a table");
        return NULL;
    }
    index_find(index, self, &key, &found);
    if (found.plan == NULL) {
        Py_DECREF(index);
        return choose(self, &key, values);
    }
    PyObject *plan = Py_NewRef(found.plan), *run = Py_NewRef(found.run), *result;
    Py_DECREF(index);
    int negated = found.refuses_negated ? reads_negated(self, values) : 0;
    if (negated)
        result = negated < 0 ? NULL : slowly(self, args, given, names);
    else {
        result = run_plan(run, values, self->count);
        if (result == NULL)
            result = answer_failure(self->failed, plan, values, self->count);
    }
    Py_DECREF(run);
    Py_DECREF(plan);
    return result;
}
