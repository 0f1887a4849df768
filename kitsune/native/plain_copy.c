/* Copies the bytes of tensors: the type PlainCopy, which does what PythonPlainCopy in plain_copy.py does. */

#include "parts.h"

#include <stdint.h>

/* As cuMemcpyDtoDAsync in "CUDA Driver API": returns 0 if the copy is under way. */
typedef int (*Copy)(uint64_t to, uint64_t from, size_t num_bytes, void *stream);

/* What a tensor is asked for. */
enum name { DTYPE, DEVICE, INDEX, SHAPE, STRIDE, IS_NEG, DATA_PTR, NBYTES, NUM_NAMES };

static const char *const spellings[NUM_NAMES] = {"dtype",  "device", "index",    "shape",
                                                 "stride", "is_neg", "data_ptr", "nbytes"};

static PyObject *names[NUM_NAMES]; /* interned, once for all */

typedef struct {
    PyObject_HEAD
    PyObject *dtype, *device, *shape, *stride, *index;
    PyObject *current_index, *current_stream;
    uint64_t address;
    size_t num_bytes;
    Copy copy;
} PlainCopy;

static int is_true(PyObject *found)
{
    if (found == NULL)
        return -1;
    int truth = PyObject_IsTrue(found);
    Py_DECREF(found);
    return truth;
}

static PyObject *get(PyObject *object, enum name name)
{
    return PyObject_GetAttr(object, names[name]);
}

static PyObject *ask(PyObject *object, enum name name)
{
    return PyObject_VectorcallMethod(names[name], &object, 1, NULL);
}

static PyObject *called(PyObject *function)
{
    return PyObject_Vectorcall(function, NULL, 0, NULL);
}

/* The number that an object is, which is let go; -1 with an exception set if it is none. */
static uint64_t number(PyObject *found)
{
    if (found == NULL)
        return (uint64_t)-1;
    uint64_t value = PyLong_AsUnsignedLongLong(found);
    Py_DECREF(found);
    return value;
}

static int is_alike(const PlainCopy *self, PyObject *tensor)
{
    int answer = is_it(get(tensor, DTYPE), self->dtype);
    if (answer > 0)
        answer = equals(ask(tensor, STRIDE), self->stride);
    if (answer > 0)
        answer = equals(get(tensor, SHAPE), self->shape);
    if (answer > 0)
        answer = equals(get(tensor, DEVICE), self->device);
    if (answer > 0)
        answer = equals(called(self->current_index), self->index);
    if (answer > 0) {
        answer = is_true(ask(tensor, IS_NEG));
        answer = answer < 0 ? answer : !answer;
    }
    return answer;
}

static PyObject *call(PyObject *object, PyObject *args, PyObject *kwargs)
{
    PlainCopy *self = (PlainCopy *)object;
    if (PyTuple_GET_SIZE(args) != 1 || (kwargs != NULL && PyDict_GET_SIZE(kwargs) != 0)) {
        PyErr_SetString(PyExc_TypeError, "expected one argument, a tensor");
        return NULL;
    }
    PyObject *tensor = PyTuple_GET_ITEM(args, 0);
    int answer = is_alike(self, tensor);
    if (answer < 0)
        return NULL;
    if (!answer)
        Py_RETURN_FALSE;
    uint64_t from = number(ask(tensor, DATA_PTR));
    if (from == (uint64_t)-1 && PyErr_Occurred())
        return NULL;
    if (from == 0)
        Py_RETURN_FALSE;
    uint64_t stream = number(called(self->current_stream));
    if (stream == (uint64_t)-1 && PyErr_Occurred())
        return NULL;
    int status;
    Py_BEGIN_ALLOW_THREADS /* it waits where much is under way already */
    status = self->copy(self->address, from, self->num_bytes, (void *)(uintptr_t)stream);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(status == 0);
}

static PyObject *new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *parameters[] = {"memory", "copy", "current_index", "current_stream", NULL};
    PyObject *memory, *current_index, *current_stream;
    unsigned long long copy;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OKOO", parameters, &memory, &copy, &current_index, &current_stream))
        return NULL;
    for (int name = 0; name < NUM_NAMES; name++) {
        if (names[name] == NULL && (names[name] = PyUnicode_InternFromString(spellings[name])) == NULL)
            return NULL;
    }
    PlainCopy *self = (PlainCopy *)type->tp_alloc(type, 0); /* zeroed */
    if (self == NULL)
        return NULL;
    Py_INCREF(current_index);
    Py_INCREF(current_stream);
    self->current_index = current_index;
    self->current_stream = current_stream;
    self->copy = (Copy)(uintptr_t)copy;
    if ((self->dtype = get(memory, DTYPE)) == NULL || (self->device = get(memory, DEVICE)) == NULL ||
        (self->index = get(self->device, INDEX)) == NULL || (self->shape = get(memory, SHAPE)) == NULL ||
        (self->stride = ask(memory, STRIDE)) == NULL)
        goto failed;
    self->address = number(ask(memory, DATA_PTR));
    if (PyErr_Occurred())
        goto failed;
    self->num_bytes = (size_t)number(get(memory, NBYTES));
    if (PyErr_Occurred())
        goto failed;
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

static int traverse(PyObject *object, visitproc visit, void *arg)
{
    PlainCopy *self = (PlainCopy *)object;
    Py_VISIT(self->dtype);
    Py_VISIT(self->device);
    Py_VISIT(self->shape);
    Py_VISIT(self->stride);
    Py_VISIT(self->index);
    Py_VISIT(self->current_index);
    Py_VISIT(self->current_stream);
    Py_VISIT(Py_TYPE(object));
    return 0;
}

/* There is no tp_clear: what it would let go takes part in cycles only together with others, which have one. */

static void dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PlainCopy *self = (PlainCopy *)object;
    PyObject_GC_UnTrack(object);
    Py_XDECREF(self->dtype);
    Py_XDECREF(self->device);
    Py_XDECREF(self->shape);
    Py_XDECREF(self->stride);
    Py_XDECREF(self->index);
    Py_XDECREF(self->current_index);
    Py_XDECREF(self->current_stream);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyType_Slot slots[] = {
    {Py_tp_doc, "Copies the bytes of tensors that lie as those of some memory."},
    {Py_tp_new, new},
    {Py_tp_call, call},
    {Py_tp_traverse, traverse},
    {Py_tp_dealloc, dealloc},
    {0, NULL},
};

PyType_Spec plain_copy_spec = {
    .name = "kitsune.native._native.PlainCopy",
    .basicsize = sizeof(PlainCopy),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};
