"""Base: what everything stands on, and what knows nothing of tensors.

In reading order:

- `moved`: modules by names that they had before;
- `public`: classes by the name that users know;
- `errors`: every error that is raised on purpose;
- `text`: values as people read them, and sizes as people write them;
- `arguments`: values as callers pass them, made Python's own;
- `memo`: results of pure functions, kept while there is room;
- `digest`: fingerprints of values;
- `dtypes`: names of element types and their sizes;
- `operations`: the ways in which addends become one value;
- `arrays`: integers in numpy;
- `drawn`: pictures of values, drawn by what stands above them.
"""
