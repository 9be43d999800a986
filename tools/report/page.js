// Draws a report: `report` is what tools/report/page.py found, `follow` the seconds between two looks at a run that continues, or 0.
const quiet = { displayModeBar: false, responsive: true };
let drawn = [];

function axis() {
  return document.querySelector("input[name=axis]:checked").value;
}

// A course's points have steps for x; here these become places on the axis that was chosen.
function draw() {
  const at = axis();
  const places = report.axes.map((run) => new Map(run.step.map((step, i) => [step, run[at][i]])));
  for (const { id, traces, layout } of report.figures) {
    const course = traces[0].type !== "bar";
    const moved = traces.map((trace) =>
      course ? { ...trace, x: trace.x.map((step) => places[trace.meta].get(step)) } : trace);
    // A zoom holds for the axis it was made on.
    const xaxis = course
      ? { ...layout.xaxis, title: { ...layout.xaxis.title, text: report.axis_names[at] }, uirevision: at }
      : layout.xaxis;
    Plotly.react(id, moved, { ...layout, xaxis }, quiet);
  }
  drawn = report.figures.map((figure) => figure.id);
}

async function look() {
  try {
    const answer = await fetch("report.json");
    report = await answer.json();
  } catch {
    document.getElementById("made").textContent = "tools.report has ended: this is what it saw last.";
    return;
  }
  if (report.figures.map((figure) => figure.id).join() !== drawn.join()) return location.reload();
  for (const [id, html] of Object.entries(report.sections)) {
    const section = document.getElementById(id);
    if (section.dataset.shown === html) continue;
    const open = new Set([...section.querySelectorAll("details[open]")].map((details) => details.id));
    section.innerHTML = section.dataset.shown = html;
    for (const details of section.querySelectorAll("details")) details.open = open.has(details.id) || details.open;
  }
  draw();
}

for (const input of document.querySelectorAll("input[name=axis]")) input.addEventListener("change", draw);
draw();
if (follow) setInterval(look, 1000 * follow);
