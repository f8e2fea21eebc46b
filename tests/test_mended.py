"""Claim: no fault that was mended comes back, for its test is still there.

A row holds a fault in one sentence, as a user met it, and the test that fails when it is back. A
row leaves only together with its reason in the commit's body: a limit on lines, or a rewriting of
its module, is none. About `CONTRIBUTING.md`.
"""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent

MENDED = (
    # models and tokenizers
    (
        "A model whose files untie its head was sampled with the embedding for a head.",
        "model/test_models.py::test_a_head_that_only_the_files_untie_is_kept_everywhere",
    ),
    (
        "A model with settings of text and vision apart ended in a traceback.",
        "model/test_models.py::test_the_text_model_of_a_model_of_images_trains_and_loads_alone",
    ),
    (
        "The text model of a whole lost the whole's scale, and computed something else.",
        "model/test_models.py::test_a_text_model_that_scales_otherwise_than_the_whole_is_refused",
    ),
    (
        "A model with several stop tokens stopped at one of them, and its export kept one.",
        "model/test_models.py::test_a_model_stops_at_every_id_of_its_own_before_and_after_export",
    ),
    (
        "The revision of one model was asked of another one.",
        "model/test_models.py::test_a_revision_is_read_of_the_model_that_was_named",
    ),
    (
        "Matrices of biases, as of gpt-oss's experts, had weight decay.",
        "model/test_optim.py::test_matrices_decay_and_biases_and_norms_do_not",
    ),
    (
        "A tokenizer without the letter x, as of DNA, ended in a traceback.",
        "test_data.py::test_an_alphabet_may_lack_any_letter",
    ),
    (
        "A prompt had the tokenizer's bos twice, or not at all.",
        "test_data.py::test_a_prompt_has_the_bos_of_its_tokenizer_once",
    ),
    (
        "A packed layer in bfloat16 rounded its sums twice.",
        "model/test_fsdp.py::test_a_packed_bfloat16_layer_rounds_once",
    ),
    (
        "A model that was dropped kept its memory until Python collected garbage.",
        "model/test_layouts.py::test_a_model_that_is_dropped_frees_its_memory_at_once",
    ),
    (
        "A model that sees later tokens was trained.",
        "test_self_checks.py::test_a_model_that_sees_later_tokens_is_refused",
    ),
    (
        "Under LoRA a reference that scored first took the gradients from the policy.",
        "model/test_lora.py::test_a_reference_that_was_asked_first_leaves_gradients_to_the_policy",
    ),
    (
        "LoRA left the experts of a mixture without adapters, and said nothing.",
        "model/test_lora.py::test_experts_have_no_adapter_and_the_run_says_so",
    ),
    (
        "A reward model read rows by the ids of the policy, or of the first reward model.",
        "rewards/test_rewards.py::test_a_judge_reads_pairs_by_its_own_tokenizer_whichever_comes_first",
    ),
    (
        "Every policy of an evaluation read conversations by the first one's template.",
        "text/test_differences.py::test_what_another_template_writes",
    ),
    (
        "Added tokens of two tokenizers were not compared.",
        "text/test_differences.py::test_other_ids_of_a_row_are_a_difference_either_way",
    ),
    (
        "A reward model's template that refuses a system turn was found after the first rollout.",
        "rewards/test_rewards.py::test_conversations_that_a_judge_cannot_render_are_found_before_it_is_loaded",
    ),
    (
        "A conversation longer than the reward model can read was found after the first rollout.",
        "text/test_chat.py"
        "::test_a_judge_without_room_for_the_end_of_a_turn_is_refused_before_it_is_loaded",
    ),
    (
        "A reward model whose config says no number of labels was refused.",
        "rewards/test_rewards.py::test_a_config_that_says_no_number_of_labels_leaves_it_to_the_head",
    ),
    (
        "What another tool saved in a model's config.json changed what a forward pass returned.",
        "model/test_folders_of_others.py::test_what_other_tools_leave_in_a_config_changes_no_score",
    ),
    (
        "A published config.json, given as a file, was refused.",
        "model/test_folders_of_others.py::test_a_config_means_the_same_as_a_file_and_in_a_folder",
    ),
    (
        "A weight of NaN was called a fault of the padding.",
        "model/test_models.py::test_weights_that_are_no_finite_numbers_are_refused_by_name",
    ),
    # rows
    (
        "Splitting off a prompt took a time that was quadratic in its white space.",
        "test_data.py::test_splitting_a_prompt_takes_a_time_that_is_linear_in_its_white_space",
    ),
    (
        "Completions that repeat their prompt were trained with the prompt in them.",
        "text/test_rows.py::test_a_prompt_that_completions_repeat_is_cut_from_them",
    ),
    (
        "Rows of a table were other than those that datasets reads.",
        "text/test_rows.py::test_rows_are_those_of_datasets",
    ),
    (
        "A reward model with another template read a conversation by the policy's.",
        "text/test_chat.py::test_a_judge_with_another_template_reads_messages_by_its_own",
    ),
    (
        "The question was cut from a prompt in a script without spaces.",
        "text/test_rows.py::test_a_missing_prompt_is_the_shared_prefix",
    ),
    (
        "The search for a shared prompt took a time that was quadratic in its words.",
        "text/test_rows.py::test_the_search_for_a_prompt_reads_a_text_once",
    ),
    (
        "Answers of Json columns were trained with their quotes.",
        "text/test_rows.py::test_chats_of_a_json_file_are_those_of_every_form_that_datasets_writes",
    ),
    (
        "Sampled pairs of conversations got a bos that the policy had not seen.",
        "experiments/test_pairs.py::test_training_on_pairs_reads_the_tokens_that_were_sampled",
    ),
    (
        "The end of one sampled prompt was put behind every typed one.",
        "experiments/test_typed_prompts.py::test_a_header_and_a_cue_are_what_nearly_all_prompts_share",
    ),
    (
        "A typed prompt that was too long for the model ended the chat in a traceback.",
        "experiments/test_typed_prompts.py"
        "::test_a_prompt_without_room_is_a_line_and_the_next_is_completed",
    ),
    (
        "A chat took a negative temperature for 0, and said nothing.",
        "experiments/test_typed_prompts.py::test_flags_that_no_sampling_has_are_one_sentence",
    ),
    (
        "Texts were trained without the model's chat template, and nothing said so.",
        "text/test_chat.py::test_a_template_that_rows_of_text_do_not_use_is_noted_once",
    ),
    (
        "One identical pair of many refused the data set.",
        "test_data.py::test_a_single_identical_pair_is_dropped_and_counted",
    ),
    (
        "A column of tools whose text is no JSON ended in a traceback.",
        "text/test_templates.py::test_tools_that_are_no_json_are_refused",
    ),
    (
        "Half of a surrogate pair ended the writer of a run's lines.",
        "record/test_jsonl.py::test_any_text_is_written_and_read_again",
    ),
    # rewards and advantages
    (
        "An async reward function with a semaphore failed at the second step.",
        "rewards/test_rewards.py::test_coroutines_of_all_calls_share_a_loop",
    ),
    (
        "A file with two reward functions was run twice, and a pool of processes failed in it.",
        "rewards/test_rewards.py::test_a_user_s_file_is_one_module_next_to_its_neighbours",
    ),
    (
        "A file of rewards could not import another file of its folder.",
        "rewards/test_rewards.py::test_a_user_s_file_is_one_module_next_to_its_neighbours",
    ),
    (
        "A reward function that changed its arguments changed what was trained on.",
        "rewards/test_rewards.py::test_a_function_changes_nothing_that_is_trained_on",
    ),
    (
        "A reward function that forked after tokenising waited for ever.",
        "rewards/test_rewards.py::test_a_reward_function_may_fork_and_tokenise_there",
    ),
    (
        "A NaN that a reward function logged emptied the metric, and nothing said so.",
        "rewards/test_rewards.py::test_what_cannot_be_logged_is_refused",
    ),
    (
        "Rewards that differed by rounding alone got advantages.",
        "test_advantages.py::test_what_rounding_may_make_is_no_difference",
    ),
    (
        "Weighted sums of rewards that differed by rounding alone were no flat group.",
        "grpo/test_grpo.py::test_weighted_sums_that_are_equal_but_for_rounding_are_a_flat_group",
    ),
    (
        "A reward that one rank refused left the others waiting.",
        "grpo/test_grpo.py::test_a_reward_that_one_rank_refuses_ends_all_before_the_next_collective",
    ),
    (
        "Negative rewards were divided by their mean, which turns their order.",
        "grpo/test_grpo.py::test_negative_rewards_are_refused_where_their_mean_divides",
    ),
    (
        "Sampled pairs lost the stop that training does not append to a text.",
        "experiments/test_pairs.py::test_a_text_keeps_the_stop_that_training_does_not_append",
    ),
    (
        "A loss or advantages that compare a row with the others of its batch were taken.",
        "objectives/test_objectives.py::test_a_broken_objective_is_refused_in_a_sentence",
    ),
    (
        "A user's objective that raised lost every step since the last checkpoint.",
        "checkpoint/test_faults.py::test_an_objective_that_raises_in_a_step_costs_none",
    ),
    (
        "What a command line replaced of a recipe's settings had rules of its own, one wrong.",
        "objectives/test_objectives.py::test_a_command_line_s_objective_replaces_the_recipe_s_with_all_settings",
    ),
    (
        "Flags that are not finite trained and exported infinite weights.",
        "config/test_config.py::test_a_number_that_is_not_finite_is_refused_for_every_flag",
    ),
    # long runs
    (
        "A damaged checkpoint ended the run, or was resumed from.",
        "checkpoint/test_checkpoint.py::test_damage_is_named_and_the_one_before_is_taken",
    ),
    (
        "A checkpoint with a shard or a manifest of another step was resumed from.",
        "checkpoint/test_checkpoint.py::test_damage_is_named_and_the_one_before_is_taken",
    ),
    (
        "A second run in a folder read the checkpoints that the first one removes.",
        "checkpoint/test_checkpoint.py::test_a_folder_is_another_run_s_until_that_is_killed",
    ),
    (
        "A resumed run went on with an edited file without a word.",
        "checkpoint/test_resume.py::test_an_edited_file_of_a_resumed_run_is_named",
    ),
    (
        "A reward function that raised lost every step since the last checkpoint.",
        "checkpoint/test_faults.py::test_a_reward_function_that_fails_costs_no_step",
    ),
    (
        "An evaluation that failed was missing in a run that went on, or there twice.",
        "checkpoint/test_faults.py::test_an_evaluation_that_could_not_be_recorded_is_made_again",
    ),
    (
        "A trained model that could not be written was lost.",
        "checkpoint/test_faults.py::test_a_model_that_cannot_be_written_is_kept_as_a_checkpoint",
    ),
    (
        "A kill in the last evaluation lost the trained model.",
        "shutdown/test_signals.py::test_a_kill_in_the_last_evaluation_loses_no_step",
    ),
    (
        "A run that a signal stopped ended with status 0, so a chain went on without its model.",
        "shutdown/test_signals.py::test_a_signal_saves_and_ends_with_its_status",
    ),
    (
        "A chain of commands went on behind a stage that failed.",
        "house/test_commands.py::test_the_chain_ends_with_a_stage_that_fails_or_is_stopped",
    ),
    (
        "A run whose folder was removed ended well, without its config.yaml.",
        "record/test_metrics.py::test_files_that_are_removed_in_mid_run_are_written_again",
    ),
    (
        "A tracker that failed ended the run.",
        "record/test_metrics.py::test_a_run_goes_on_without_wandb",
    ),
    # flags
    (
        "A negative number behind a flag was taken for another flag.",
        "stages/test_mistakes.py::test_a_negative_number_is_a_value_however_it_is_written",
    ),
    (
        "A misspelt choice of a flag or of a recipe's key was refused without the nearest one.",
        "config/test_hints.py::test_a_misspelt_choice_is_answered_with_the_nearest",
    ),
    (
        "A run that was started twice threw away what the first finished while the second loaded.",
        "checkpoint/test_checkpoint.py::test_what_a_run_finds_to_resume_holds_until_it_ends",
    ),
    (
        "A second evaluation in a folder removed the first one without a word.",
        "evaluation/test_comparison.py::test_an_earlier_evaluation_is_removed_and_that_is_said",
    ),
    (
        "A second run in the last seconds of the first one made it again.",
        "checkpoint/test_resume.py::test_a_finished_run_is_left_as_it_is",
    ),
    (
        "A folder stayed locked by a notebook in which a run was refused.",
        "stages/test_mistakes.py::test_the_good_input_is_not_refused",
    ),
    (
        "A second run in a folder was refused only after its models were loaded.",
        "checkpoint/test_checkpoint.py::test_a_folder_is_another_run_s_until_that_is_killed",
    ),
    (
        "A batch size far beyond the rows filled the memory with rows that count nowhere.",
        "stages/test_mistakes.py::test_a_mistake_ends_in_one_sentence_before_weights_are_read",
    ),
    (
        "A recipe that an editor began with a byte order mark was not read.",
        "stages/test_mistakes.py::test_a_recipe_with_a_byte_order_mark_is_read",
    ),
    (
        "A secret in the environment was written into a run's files.",
        "house/test_security.py::test_no_secret_of_the_environment_is_written_or_printed",
    ),
    (
        "A long run without --save_steps lost everything at a kill.",
        "checkpoint/test_save_minutes.py::test_a_kill_costs_half_an_hour_at_most",
    ),
    (
        "A step of minutes began without a sign of life.",
        "test_run.py::test_a_run_says_once_what_a_step_takes",
    ),
    (
        "No bar moved while GRPO sampled the completions of a step, for minutes.",
        "grpo/test_grpo.py::test_the_bar_of_a_rollout_moves_with_every_token",
    ),
    (
        "The bar of an evaluation stood still until whole batches of prompts were sampled.",
        "sampling/test_generation.py::test_every_token_reports_its_part_of_the_completions",
    ),
    (
        "A finished run that went on lost its last evaluation.",
        "checkpoint/test_faults.py::test_a_finished_run_that_goes_on_keeps_its_last_evaluation",
    ),
    (
        "A job resumed by the restart count of the job that had submitted it.",
        "checkpoint/test_checkpoint.py::test_a_restart_counts_only_where_this_job_wrote_last",
    ),
    (
        "An evaluation in which the length decided all verdicts ended in an error.",
        "evaluation/test_win_rates.py::test_verdicts_that_the_length_decides_have_a_maximum",
    ),
    (
        "A full temporary folder ended in a traceback.",
        "shutdown/test_failures.py::test_a_disk_without_room_ends_a_command_in_a_sentence",
    ),
    (
        "WANDB_RUN_ID was overruled.",
        "record/test_metrics.py::test_what_the_environment_sets_of_wandb_is_not_overruled",
    ),
    (
        "The records of another tool in the output folder were emptied.",
        "checkpoint/test_checkpoint.py::test_records_of_another_tool_are_not_cut",
    ),
    (
        "A variant of a sweep without Latin letters took the folder of its base run.",
        "experiments/runs/test_sweep.py::test_runs_of_other_variants_have_other_folders",
    ),
    (
        "A requirements file that moved named a file that is not there.",
        "house/test_commands.py::test_a_requirements_file_names_files_and_packages",
    ),
    (
        "A config.yaml of another trainer next to a model was read as a run's.",
        "evaluation/test_comparison.py::test_what_another_tool_left_next_to_a_model_makes_it_no_run_s",
    ),
    # messages
    (
        "A path of the repository was said not to exist, not that the command ran elsewhere.",
        "stages/test_mistakes.py::test_a_mistake_ends_in_one_sentence_before_weights_are_read",
    ),
    (
        "A model that no stage had written yet was said not to exist, not which command writes it.",
        "stages/test_mistakes.py::test_a_mistake_ends_in_one_sentence_before_weights_are_read",
    ),
    (
        "Pickled weights were refused without their file's name and without a remedy.",
        "stages/test_mistakes.py::test_a_mistake_ends_in_one_sentence_before_weights_are_read",
    ),
    (
        "A run with checkpoints was said to hold no model, and none of them was named.",
        "stages/test_mistakes.py::test_a_mistake_ends_in_one_sentence_before_weights_are_read",
    ),
    (
        "A column of system messages next to messages was left out, and nothing said so.",
        "text/test_schemas.py::test_a_system_message_in_a_column_is_said_to_be_unread",
    ),
    (
        "A moving reference of other shapes than the policy ended the run at its first update.",
        "grpo/test_grpo.py::test_a_reference_of_other_shapes_does_not_move",
    ),
    (
        "A server of rollouts that answered with a page ended the run in a traceback, unsaved.",
        "sampling/test_engine.py::test_nonsense_is_named",
    ),
    (
        "The length that a run printed for prompts was refused: it left no room for other drops.",
        "test_data.py::test_the_printed_limit_of_prompts_is_not_refused",
    ),
    # machines
    (
        "Bfloat16 on a CPU without its products took many times as long, and nothing said so.",
        "shutdown/test_failures.py::test_a_cpu_on_which_bfloat16_is_slow_is_named",
    ),
    (
        "A GPU whose driver is too old for torch was left out, and the CPU trained.",
        "shutdown/test_failures.py"
        "::test_a_gpu_that_torch_cannot_use_is_no_reason_to_train_on_the_cpu",
    ),
    (
        "A rank whose torchrun was killed while the rank imported waited half an hour.",
        "shutdown/test_failures.py::test_a_process_whose_torchrun_died_while_it_imported_ends",
    ),
    # comparisons
    (
        "TRL's side of the time to quality got an empty setting, and ended before its first step.",
        "experiments/evidence/test_benchmark_fixture.py"
        "::test_trl_trains_every_stage_by_its_command",
    ),
    # evaluation and reports
    (
        "A judge that failed lost the completions that were sampled before it.",
        "evaluation/test_generation_quality.py"
        "::test_a_judge_that_fails_loses_nothing_that_was_measured_before_it",
    ),
    (
        "Equal completions won or lost by the rounding of their rewards.",
        "evaluation/test_win_rates.py::test_the_same_text_is_a_tie_whatever_rounding_says",
    ),
    (
        "A text in a table moved the cursor or cleared the screen.",
        "record/test_metrics.py::test_no_table_obeys_what_its_cells_or_headers_hold",
    ),
    (
        "Reports replaced the joiners of Persian and the spaces of Japanese.",
        "report/test_report_page.py::test_words_keep_what_they_are_spelled_with",
    ),
    (
        "An empty completion was an empty cell.",
        "report/test_report_page.py::test_a_completion_that_shows_nothing_is_said_to_be_empty",
    ),
    (
        "The table of generations was cut at the width of a laptop's screen.",
        "report/test_report_page.py::test_a_table_of_many_intervals_is_not_cut",
    ),
    (
        "A person's verdicts were left out of the terminal's win rates.",
        "report/test_plots.py::test_the_terminal_shows_the_systems_and_win_rates",
    ),
    (
        "The reward model's mean reward had another name in each table.",
        "report/test_plots.py::test_what_a_reward_function_gave_is_in_table_figure_and_numbers",
    ),
)


@pytest.mark.parametrize("test", dict.fromkeys(test for _, test in MENDED))
def test_the_test_of_a_mend_is_there(test: str) -> None:
    path, _, name = test.partition("::")
    module = ast.parse((TESTS / path).read_text())
    tests = [node.name for node in module.body if isinstance(node, ast.FunctionDef)]
    faults = " ".join(fault for fault, each in MENDED if each == test)
    assert name in tests, f"{path} has no {name}, which holds what was mended: {faults}"


def test_every_fault_is_one_sentence_and_there_once() -> None:
    faults = [fault for fault, _ in MENDED]
    assert len({*faults}) == len(faults)
    assert all(fault.endswith(".") and ". " not in fault for fault in faults)
