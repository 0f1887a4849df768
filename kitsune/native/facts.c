/* Checks facts about Python objects: the type Facts, which does what PythonFacts in facts.py does. */

#include "parts.h"

/* In the order of the functions in facts.py that make them. */
enum kind { ATTRIBUTE, ITEM, RESULT, MEMBERS, CONTENTS, DEFINITION, ABSENCE, NUM_KINDS };

typedef struct {
    enum kind kind;
    PyObject *subject;
    PyObject *key;
    PyObject *expected;
    unsigned int version; /* of a class that was found as expected; 0: of none */
} Fact;

typedef struct {
    PyObject_HEAD
    Py_ssize_t count;
    Fact *facts;
} Facts;

static int has_item(PyObject *container, PyObject *key, PyObject *expected)
{
    if (!PyDict_CheckExact(container))
        return is_it(PyObject_GetItem(container, key), expected);
    PyObject *found = PyDict_GetItemWithError(container, key); /* borrowed, and only compared */
    if (found == NULL && PyErr_Occurred())
        return -1;
    return found == expected;
}

static int returns(PyObject *function, PyObject *args, PyObject *expected)
{
    size_t count = (size_t)PyTuple_GET_SIZE(args);
    return equals(PyObject_Vectorcall(function, PySequence_Fast_ITEMS(args), count, NULL), expected);
}

static int has_members(PyObject *list, PyObject *expected)
{
    Py_ssize_t count = PyTuple_GET_SIZE(expected);
    if (PyList_GET_SIZE(list) != count)
        return 0;
    for (Py_ssize_t place = 0; place < count; place++) {
        if (PyList_GET_ITEM(list, place) != PyTuple_GET_ITEM(expected, place))
            return 0;
    }
    return 1;
}

static int has_contents(PyObject *dict, PyObject *keys, PyObject *values)
{
    if (PyDict_Size(dict) != PyTuple_GET_SIZE(keys))
        return 0;
    PyObject *key, *value;
    Py_ssize_t position = 0, place = 0;
    while (PyDict_Next(dict, &position, &key, &value)) {
        if (key != PyTuple_GET_ITEM(keys, place) || value != PyTuple_GET_ITEM(values, place))
            return 0;
        place++;
    }
    return 1;
}

/* Of the class as it is, and of its bases, which Python counts to keep what it has looked up; 0: of none. */
static unsigned int version_of(PyTypeObject *type)
{
#if PY_VERSION_HEX < 0x030D0000
    if (!(type->tp_flags & Py_TPFLAGS_VALID_VERSION_TAG))
        return 0;
#endif
    return type->tp_version_tag;
}

/* NOTED_BY_PYTHON in facts.py */
static int is_noted_by_python(PyObject *name)
{
    return PyUnicode_Check(name) && (PyUnicode_CompareWithASCIIString(name, "__annotations__") == 0 ||
                                     PyUnicode_CompareWithASCIIString(name, "__slotnames__") == 0);
}

static int has_attributes(PyObject *dict, PyObject *names, PyObject *expected)
{
    Py_ssize_t count = PyTuple_GET_SIZE(names);
    PyObject *name, *value;
    Py_ssize_t position = 0, place = 0;
    while (PyDict_Next(dict, &position, &name, &value)) {
        if (is_noted_by_python(name))
            continue;
        if (place == count)
            return 0;
        PyObject *wanted = PyTuple_GET_ITEM(expected, place + 1);
        if (name != PyTuple_GET_ITEM(names, place) || (wanted != Py_Ellipsis && value != wanted))
            return 0;
        place++;
    }
    return place == count;
}

static int is_defined(Fact *fact)
{
    PyTypeObject *type = (PyTypeObject *)fact->subject;
    unsigned int version = version_of(type);
    if (version != 0 && version == fact->version)
        return 1;
    if (type->tp_mro != PyTuple_GET_ITEM(fact->expected, 0))
        return 0;
#if PY_VERSION_HEX >= 0x030C0000
    PyObject *dict = PyType_GetDict(type);
#else
    PyObject *dict = Py_XNewRef(type->tp_dict);
#endif
    if (dict == NULL)
        return 0;
    int answer = has_attributes(dict, fact->key, fact->expected);
    Py_DECREF(dict);
    if (answer)
        fact->version = version;
    return answer;
}

static int is_absent(PyObject *dict, PyObject *key)
{
    if (PyDict_GetItemWithError(dict, key) != NULL)
        return 0;
    return PyErr_Occurred() ? -1 : 1;
}

static int holds(Fact *fact)
{
    switch (fact->kind) {
    case ATTRIBUTE:
        return is_it(PyObject_GetAttr(fact->subject, fact->key), fact->expected);
    case ITEM:
        return has_item(fact->subject, fact->key, fact->expected);
    case RESULT:
        return returns(fact->subject, fact->key, fact->expected);
    case MEMBERS:
        return has_members(fact->subject, fact->expected);
    case CONTENTS:
        return has_contents(fact->subject, fact->key, fact->expected);
    case DEFINITION:
        return is_defined(fact);
    case ABSENCE:
        return is_absent(fact->subject, fact->key);
    default:
        Py_UNREACHABLE();
    }
}

static PyObject *hold(PyObject *object, PyObject *Py_UNUSED(unused))
{
    Facts *self = (Facts *)object;
    for (Py_ssize_t place = 0; place < self->count; place++) {
        int answer = holds(&self->facts[place]);
        if (answer > 0)
            continue;
        if (answer < 0) {
            if (!PyErr_ExceptionMatches(PyExc_Exception))
                return NULL; /* an interrupt */
            PyErr_Clear();
        }
        Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

/* Whether the parts are of the types that the check of this kind takes for granted. */
static int is_sound(long kind, PyObject *subject, PyObject *key, PyObject *expected)
{
    switch (kind) {
    case ATTRIBUTE:
        return PyUnicode_Check(key);
    case ITEM:
        return 1;
    case RESULT:
        return PyTuple_Check(key);
    case MEMBERS:
        return PyList_Check(subject) && PyTuple_Check(expected);
    case CONTENTS:
        return PyDict_Check(subject) && PyTuple_Check(key) && PyTuple_Check(expected) &&
               PyTuple_GET_SIZE(key) == PyTuple_GET_SIZE(expected);
    case DEFINITION:
        return PyType_Check(subject) && PyTuple_Check(key) && PyTuple_Check(expected) &&
               PyTuple_GET_SIZE(key) + 1 == PyTuple_GET_SIZE(expected);
    case ABSENCE:
        return PyDict_Check(subject);
    default:
        return 0;
    }
}

static int take(Facts *self, PyObject *row)
{
    if (PyTuple_Check(row) && PyTuple_GET_SIZE(row) == 4) {
        long kind = PyLong_AsLong(PyTuple_GET_ITEM(row, 0));
        if (kind == -1 && PyErr_Occurred())
            return -1;
        PyObject *subject = PyTuple_GET_ITEM(row, 1);
        PyObject *key = PyTuple_GET_ITEM(row, 2);
        PyObject *expected = PyTuple_GET_ITEM(row, 3);
        if (is_sound(kind, subject, key, expected)) {
            Py_INCREF(subject);
            Py_INCREF(key);
            Py_INCREF(expected);
            self->facts[self->count++] = (Fact){(enum kind)kind, subject, key, expected, 0};
            return 0;
        }
    }
    PyErr_Format(PyExc_TypeError, "%R is not a fact", row);
    return -1;
}

static PyObject *new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"facts", NULL};
    PyObject *given;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O", names, &given))
        return NULL;
    PyObject *rows = PySequence_Tuple(given);
    if (rows == NULL)
        return NULL;
    Facts *self = (Facts *)type->tp_alloc(type, 0); /* zeroed */
    if (self == NULL) {
        Py_DECREF(rows);
        return NULL;
    }
    Py_ssize_t count = PyTuple_GET_SIZE(rows);
    self->facts = PyMem_New(Fact, count);
    if (self->facts == NULL)
        PyErr_NoMemory();
    for (Py_ssize_t place = 0; place < count && !PyErr_Occurred(); place++)
        take(self, PyTuple_GET_ITEM(rows, place));
    Py_DECREF(rows);
    if (PyErr_Occurred())
        Py_CLEAR(self);
    return (PyObject *)self;
}

static int traverse(PyObject *object, visitproc visit, void *arg)
{
    Facts *self = (Facts *)object;
    for (Py_ssize_t place = 0; place < self->count; place++) {
        Py_VISIT(self->facts[place].subject);
        Py_VISIT(self->facts[place].key);
        Py_VISIT(self->facts[place].expected);
    }
    Py_VISIT(Py_TYPE(object));
    return 0;
}

static int clear(PyObject *object)
{
    Facts *self = (Facts *)object;
    while (self->count > 0) {
        Fact fact = self->facts[--self->count];
        Py_DECREF(fact.subject);
        Py_DECREF(fact.key);
        Py_DECREF(fact.expected);
    }
    return 0;
}

static void dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    clear(object);
    PyMem_Free(((Facts *)object)->facts);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"hold", hold, METH_NOARGS, "Whether all facts hold. What raises an Exception does not."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Checks facts in order."},
    {Py_tp_new, new},
    {Py_tp_traverse, traverse},
    {Py_tp_clear, clear},
    {Py_tp_dealloc, dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

PyType_Spec facts_spec = {
    .name = "kitsune.native._native.Facts",
    .basicsize = sizeof(Facts),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};
