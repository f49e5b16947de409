// Command evaluate is an evaluation harness: it submits the tasks of a file to a run and reports what they earned.
//
//	ASTRAFLOW_JOIN=127.0.0.1:7070 evaluate tasks.jsonl
//
// Each line of the file is `{"id": "sum-1", "prompt": "What is 17 + 25?", "answer": "42"}`; `answer` is what the run's
// reward reads. The nodes of the run sample each task twice and grade it. A task whose nodes give up counts as 0.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"log"
	"os"
	"time"

	astraflow "github.com/astraflow/astraflow/clients/go"
	dataflowv1 "github.com/astraflow/astraflow/clients/go/astraflow/dataflow/v1"
	rolloutv1 "github.com/astraflow/astraflow/clients/go/astraflow/rollout/v1"
)

func main() {
	client, err := astraflow.Connect(os.Getenv("ASTRAFLOW_JOIN"))
	check(err)
	defer client.Close()
	ctx, attempt := context.Background(), fmt.Sprintf("evaluate-%d", time.Now().UnixMilli())
	var ids []string
	for _, line := range lines(os.Args[1]) {
		var question struct{ ID, Prompt, Answer string }
		check(json.Unmarshal(line, &question))
		answer, _ := json.Marshal(map[string]string{"answer": question.Answer})
		task := &rolloutv1.Task{TaskId: attempt + "." + question.ID, DataJson: answer, GroupSize: 2,
			Messages: []*rolloutv1.Message{{Role: "user", Content: question.Prompt}}}
		_, err := client.Tasks.SubmitTasks(ctx, &dataflowv1.SubmitTasksRequest{Tasks: []*rolloutv1.Task{task}})
		check(err)
		ids = append(ids, question.ID)
	}
	sum := 0.0
	for _, id := range ids {
		task := finished(ctx, client, attempt+"."+id)
		mean := 0.0
		for _, trajectory := range task.Trajectories {
			mean += trajectory.Reward / float64(len(task.Trajectories))
		}
		sum += mean
		fmt.Printf("%s\t%.3f\n", id, mean)
	}
	fmt.Printf("mean reward %.3f of %d tasks\n", sum/float64(len(ids)), len(ids))
}

func finished(ctx context.Context, client *astraflow.Client, taskID string) *dataflowv1.TaskTrace {
	for ; ; time.Sleep(250 * time.Millisecond) {
		answer, err := client.Admin.Why(ctx, &dataflowv1.WhyRequest{TaskId: taskID})
		check(err)
		if answer.Task.GetState() >= dataflowv1.TaskState_TASK_STATE_COMPLETE {
			return answer.Task
		}
	}
}

func lines(path string) (found [][]byte) {
	file, err := os.Open(path)
	check(err)
	for scanner := bufio.NewScanner(file); scanner.Scan(); {
		found = append(found, append([]byte(nil), scanner.Bytes()...))
	}
	return found
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
