"""Base: errors, text, arguments, caches and arrays, which all other wings use.

In reading order:

- `moved`: modules found by their former names;
- `public`: classes by the names that users know;
- `views`: mappings that cannot be changed;
- `errors`: every error that is raised on purpose;
- `text`: values as people read them, and sizes as people write them;
- `arguments`: values as callers pass them, checked and made plain;
- `memo`: results of pure functions, cached while there is room;
- `digest`: fingerprints of values;
- `dtypes`: names of element types and their sizes;
- `operations`: the ways in which addends become one value;
- `arrays`: integers in numpy;
- `drawn`: pictures of values, drawn by `display`.
"""
