const MOST_PAIRS = 4e6; // of lines that are compared

// The lines that turn one text into another: [kind, line, from, to] with kind " ", "-" or "+"; of a changed line, the
// characters from..to differ from its counterpart.
function diffLines(before, after) {
  const a = before.split("\n"), b = after.split("\n");
  let head = 0, tail = 0;
  while (head < a.length && head < b.length && a[head] === b[head]) head++;
  while (tail < a.length - head && tail < b.length - head && a[a.length - 1 - tail] === b[b.length - 1 - tail]) tail++;
  const rows = a.length - head - tail, columns = b.length - head - tail, width = columns + 1;
  // Where that would take too long, all that is between goes and comes.
  const aligned = rows * columns <= MOST_PAIRS;
  // longest[i * width + j]: lines that a from i and b from j have in common, in order.
  const longest = new Uint16Array(aligned ? (rows + 1) * width : 0);
  for (let i = rows - 1; aligned && i >= 0; i--) {
    for (let j = columns - 1; j >= 0; j--) {
      const skip = Math.max(longest[(i + 1) * width + j], longest[i * width + j + 1]);
      longest[i * width + j] = a[head + i] === b[head + j] ? longest[(i + 1) * width + j + 1] + 1 : skip;
    }
  }
  const found = a.slice(0, head).map(function (line) { return [" ", line, 0, 0]; });
  let gone = [], come = [], i = 0, j = 0;
  function goes(i, j) {
    return !aligned || longest[(i + 1) * width + j] >= longest[i * width + j + 1];
  }
  function changed() {
    const pairs = Math.min(gone.length, come.length);
    const spans = gone.slice(0, pairs).map(function (line, at) { return span(line, come[at]); });
    gone.forEach(function (line, at) { found.push(["-", line, ...(spans[at] ? spans[at][0] : [0, 0])]); });
    come.forEach(function (line, at) { found.push(["+", line, ...(spans[at] ? spans[at][1] : [0, 0])]); });
    gone = [];
    come = [];
  }
  while (i < rows || j < columns) {
    if (aligned && i < rows && j < columns && a[head + i] === b[head + j]) {
      changed();
      found.push([" ", a[head + i], 0, 0]);
      i++;
      j++;
    } else if (j === columns || (i < rows && goes(i, j))) {
      gone.push(a[head + i++]);
    } else {
      come.push(b[head + j++]);
    }
  }
  changed();
  for (const line of a.slice(a.length - tail)) found.push([" ", line, 0, 0]);
  return found;
}

// Where two lines differ: the characters [from, to] of each; none where little but the indentation is the same, or
// where a mark of hidden characters (programs.js) could be cut in two.
function span(one, other) {
  const least = Math.min(one.length, other.length);
  let head = 0, tail = 0;
  while (head < least && one[head] === other[head]) head++;
  while (tail < least - head && one[one.length - 1 - tail] === other[other.length - 1 - tail]) tail++;
  const indented = Math.min(head, one.length - one.trimStart().length);
  const marks = (one + other).includes("\u0001");
  if (marks || 2 * (head + tail - indented) < least - indented) return [[0, 0], [0, 0]];
  return [[head, one.length - tail], [head, other.length - tail]];
}
