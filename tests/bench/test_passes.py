"""The table of passes, of a program written by hand."""

from bench.passes import PROJECT, Kind, table

ESTIMATE = 'stack_frame_id={}}}, backend_config={{"estimated_cycles":"{}"}}'
HLO = f"""HloModule hand_written

FileNames
1 "{PROJECT}/model/layers.py"
2 "{PROJECT}/.venv/lib/python3.11/site-packages/optax/update.py"

FunctionNames
1 "matmul"
2 "Linear.__call__"
3 "update"

FileLocations
1 {{file_name_id=1 function_name_id=2 line=20 end_line=20}}
2 {{file_name_id=1 function_name_id=1 line=10 end_line=10}}
3 {{file_name_id=2 function_name_id=3 line=30 end_line=30}}

StackFrames
1 {{file_location_id=1 parent_frame_id=1}}
2 {{file_location_id=2 parent_frame_id=2}}
3 {{file_location_id=3 parent_frame_id=2}}

%with_product (a: bf16[8,8]) -> f32[8,8] {{
  %a = bf16[8,8]{{1,0}} parameter(0)
  ROOT %dot.1 = f32[8,8]{{1,0}} dot(%a, %a)
}}

%without (b: f32[8,8]) -> f32[8,8] {{
  %b = f32[8,8]{{1,0}} parameter(0)
  ROOT %neg.1 = f32[8,8]{{1,0}} negate(%b)
}}

ENTRY %main (p: bf16[8,8]) -> f32[8,8] {{
  %p = bf16[8,8]{{1,0}} parameter(0)
  %f.1 = f32[8,8]{{1,0}} fusion(%p), calls=%with_product, metadata={{{ESTIMATE.format(2, 70)}
  %f.2 = f32[8,8]{{1,0}} fusion(%f.1), calls=%without, metadata={{{ESTIMATE.format(3, 5)}
  ROOT %f.3 = f32[8,8]{{1,0}} fusion(%f.2), calls=%without, metadata={{{ESTIMATE.format(3, 6)}
}}
"""


def test_instructions_are_summed_up_by_kind_result_and_the_line_of_this_project():
    """A library's frame counts as the line that called it."""
    assert table(HLO) == {
        Kind("product", "f32[8,8]", "matmul:10"): (70, 128 + 256, 1),
        Kind("pass", "f32[8,8]", "__call__:20"): (11, 2 * (256 + 256), 2),
    }
