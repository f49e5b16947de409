package astraflow

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unsafe"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"

	dataflowv1 "github.com/astraflow/astraflow/clients/go/astraflow/dataflow/v1"
	rolloutv1 "github.com/astraflow/astraflow/clients/go/astraflow/rollout/v1"
)

// server keeps the tokens that it was called with.
type server struct {
	dataflowv1.UnimplementedRunServiceServer
	tokens []string
}

func (s *server) ListRuns(ctx context.Context, _ *dataflowv1.ListRunsRequest) (*dataflowv1.ListRunsResponse, error) {
	sent, _ := metadata.FromIncomingContext(ctx)
	s.tokens = append(s.tokens, strings.Join(sent.Get("authorization"), ","))
	return &dataflowv1.ListRunsResponse{}, nil
}

// proof is a certificate of its own authority, and its key.
type proof struct {
	certificate []byte
	key         *ecdsa.PrivateKey
}

func newProof(t *testing.T, name string) proof {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	failOn(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name}, DNSNames: []string{name},
		NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
	}
	certificate, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	failOn(t, err)
	return proof{certificate, key}
}

// serve shows a certificate at an address, and wants one of clients where it is given their authority.
func serve(t *testing.T, address string, shown proof, clients *proof) (string, *server, func()) {
	t.Helper()
	config := &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{shown.certificate}, PrivateKey: shown.key}}}
	if clients != nil {
		authority, err := x509.ParseCertificate(clients.certificate)
		failOn(t, err)
		config.ClientCAs, config.ClientAuth = x509.NewCertPool(), tls.RequireAndVerifyClientCert
		config.ClientCAs.AddCert(authority)
	}
	serving := grpc.NewServer(grpc.Creds(credentials.NewTLS(config)))
	running := &server{}
	dataflowv1.RegisterRunServiceServer(serving, running)
	listener, err := net.Listen("tcp", address)
	failOn(t, err)
	go func() { _ = serving.Serve(listener) }()
	t.Cleanup(serving.Stop)
	return listener.Addr().String(), running, serving.Stop
}

func startServer(t *testing.T) (address string, certificate []byte, running *server) {
	t.Helper()
	shown := newProof(t, "central.example")
	address, running, _ = serve(t, "127.0.0.1:0", shown, nil)
	return address, shown.certificate, running
}

func joinString(t *testing.T, fields map[string]interface{}) string {
	t.Helper()
	content, err := json.Marshal(fields)
	failOn(t, err)
	return joinPrefix + base64.RawURLEncoding.EncodeToString(content)
}

func call(t *testing.T, target string, options ...Option) error {
	t.Helper()
	client, err := Connect(target, append(options, WithRetry(RetryPolicy{}))...)
	failOn(t, err)
	defer client.Close()
	_, err = client.Runs.ListRuns(context.Background(), &dataflowv1.ListRunsRequest{})
	return err
}

func TestAJoinStringIsAllThatAServerBehindTLSNeeds(t *testing.T) {
	address, certificate, running := startServer(t)
	join := joinString(t, map[string]interface{}{
		"address": address, "ca": [][]byte{certificate}, "server_name": "central.example", "token": "t0ken",
	})
	failOn(t, call(t, "  "+join+"\n"))
	if len(running.tokens) != 1 || running.tokens[0] != "Bearer t0ken" {
		t.Fatalf("the server saw %q", running.tokens)
	}
}

func TestAServerThatDoesNotProveWhoItIsIsUntrusted(t *testing.T) {
	address, certificate, _ := startServer(t)
	_, otherCertificate, _ := startServer(t)
	for name, fields := range map[string]map[string]interface{}{
		"another authority": {"address": address, "ca": [][]byte{otherCertificate}, "server_name": "central.example"},
		"another name":      {"address": address, "ca": [][]byte{certificate}, "server_name": "other.example"},
		"a public CA":       {"address": address, "public_ca": true, "server_name": "central.example"},
	} {
		if err := call(t, joinString(t, fields)); ReasonOf(err) != UntrustedServer {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestATokenFileIsReadForEachCall(t *testing.T) {
	address, certificate, running := startServer(t)
	join := joinString(t, map[string]interface{}{
		"address": address, "ca": [][]byte{certificate}, "server_name": "central.example",
	})
	path := filepath.Join(t.TempDir(), "token")
	client, err := Connect(join, WithTokenFile(path), WithRetry(RetryPolicy{}))
	failOn(t, err)
	defer client.Close()
	for _, token := range []string{"one", "two"} {
		failOn(t, os.WriteFile(path, []byte(token+"\n"), 0o600))
		_, err := client.Runs.ListRuns(context.Background(), &dataflowv1.ListRunsRequest{})
		failOn(t, err)
	}
	if strings.Join(running.tokens, " ") != "Bearer one Bearer two" {
		t.Fatalf("the server saw %q", running.tokens)
	}
}

func TestATokenDoesNotTravelInTheClear(t *testing.T) {
	if _, err := Connect("central.example:7070", WithToken("secret")); ReasonOf(err) != InvalidArgument {
		t.Fatalf("got %v", err)
	} else if strings.Contains(err.Error(), "secret") {
		t.Fatalf("the error shows the token: %v", err)
	}
	for _, target := range []string{"127.0.0.1:7070", "[::1]:7070", "localhost:7070"} {
		_, err := Connect(target, WithToken("secret"))
		failOn(t, err)
	}
	_, err := Connect("central.example:7070", WithToken("secret"), WithInsecure())
	failOn(t, err)
}

func TestColumnsAreViewsOfTheirMessage(t *testing.T) {
	columns := Columns{TokenIDs: []int32{1, 2, 3}, LossMask: []bool{false, true, true}, Logprobs: []float32{0, -0.5, -1}}
	message, err := EncodeColumns(columns, "t")
	failOn(t, err)
	decoded, err := DecodeColumns(message)
	failOn(t, err)
	if isLittleEndian && unsafe.Pointer(&decoded.TokenIDs[0]) != unsafe.Pointer(&message.TokenIds[0]) {
		t.Error("the token ids were copied")
	}
	message.TokenIds = append([]byte{0}, message.TokenIds...)[1:] // at an odd address, as from the wire
	decoded, err = DecodeColumns(message)
	failOn(t, err)
	if decoded.TokenIDs[2] != 3 || decoded.Logprobs[1] != -0.5 || decoded.LossMask[0] || !decoded.LossMask[2] {
		t.Errorf("got %v", decoded)
	}
}

func TestTheHeaderFollowsFromTheTokens(t *testing.T) {
	columns := Columns{
		TokenIDs: []int32{1, 2, 3, 4}, LossMask: []bool{false, true, true, false}, Logprobs: make([]float32, 4),
		VersionSpans: []*rolloutv1.VersionSpan{{Start: 1, End: 2, Version: 7}, {Start: 2, End: 4, Version: 5}},
	}
	item, err := TrajectoryItem(&rolloutv1.TrajectoryHeader{TrajectoryId: "t", PolicyId: "p"}, columns, nil)
	failOn(t, err)
	header := item.GetHeader()
	if header.NumTokens != 4 || header.NumTrainableTokens != 2 || header.MinVersion != 5 || header.MaxVersion != 7 {
		t.Errorf("got %v", header)
	}
	columns.VersionSpans = columns.VersionSpans[:1]
	_, err = TrajectoryItem(&rolloutv1.TrajectoryHeader{TrajectoryId: "t", PolicyId: "p"}, columns, nil)
	if ReasonOf(err) != InvalidTrajectory {
		t.Errorf("a token in no span: %v", err)
	}
}

func TestJoinStringsAreReadAsInEveryLanguage(t *testing.T) {
	raw, err := os.ReadFile("../../tests/conformance/join_strings.json")
	failOn(t, err)
	var table struct {
		Good []struct {
			Case, Text string
			Content    struct {
				Address    string
				CA         [][]byte
				PublicCA   bool   `json:"public_ca"`
				ServerName string `json:"server_name"`
				Token      string
			}
		}
		Bad []struct{ Case, Text, Says string }
	}
	failOn(t, json.Unmarshal(raw, &table))
	if len(table.Good) == 0 || len(table.Bad) == 0 {
		t.Fatal("the table is empty")
	}
	for _, row := range table.Good {
		join, err := ParseJoin(row.Text)
		failOn(t, err)
		got, wanted := fmt.Sprint(*join), fmt.Sprint(Join(row.Content))
		if got != wanted {
			t.Errorf("%s: got %s, wanted %s", row.Case, got, wanted)
		}
	}
	for _, row := range table.Bad {
		_, err := ParseJoin(row.Text)
		if ReasonOf(err) != InvalidArgument || !strings.Contains(err.Error(), row.Says) {
			t.Errorf("%s: got %v, wanted %q", row.Case, err, row.Says)
		}
	}
}

func TestAReasonSurvivesBeingWrapped(t *testing.T) {
	_, err := ParseJoin("127.0.0.1:7070")
	if ReasonOf(err) != InvalidArgument || ReasonOf(os.ErrNotExist) != "" {
		t.Errorf("got %v", err)
	}
}

func failOn(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
